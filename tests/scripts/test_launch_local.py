from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import finished

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "launch_local.sh")
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
SMALL = ("model.num_layers=2", "model.hidden_size=32", "train.num_microbatches=[2,3]")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(120),
]

# No `megatron` marker: ranks start in the same way with all of its releases.
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

HANG = """
import os, pathlib, signal, sys, time
action = signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, action)
pathlib.Path(sys.argv[1], f"ready{os.environ['RANK']}").touch()
time.sleep(600)
"""


def environment(marked: Any, num_ranks: int = 2) -> dict[str, str]:
    return {
        **marked.environment,
        "CHUNKGRAPH_NPROC_PER_NODE": str(num_ranks),
        "CHUNKGRAPH_PYTHON": sys.executable,
    }


def launch(
    marked: Any, *arguments: str, num_ranks: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    env = {**environment(marked, num_ranks), **variables}
    return finished([SCRIPT, *arguments], env, timeout_s=90, cwd=marked.folder)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "usage: scripts/launch_local.sh"),
        (["train"], {}, "'train' is neither a .yaml configuration nor a .py script"),
        (["none.yaml"], {}, "there is no file 'none.yaml'"),
        (["none.py", "--flag"], {}, "there is no file 'none.py'"),
        (["--config", CONFIG], {}, "needs a script after it"),
        (["--config=x.yaml", "none.py"], {}, "there is no file 'none.py'"),
        (
            [CONFIG],
            {"CHUNKGRAPH_NPROC_PER_NODE": "two"},
            "CHUNKGRAPH_NPROC_PER_NODE is 'two'; expected a number from 1",
        ),
        (
            [CONFIG],
            {"CHUNKGRAPH_PYTHON": "no-such-python"},
            "there is no program 'no-such-python'",
        ),
    ],
)
def test_wrong_usage_ends_with_2_and_starts_nothing(
    marked: Any, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    result = launch(marked, *arguments, **variables)
    assert result.returncode == 2
    assert message in result.stderr
    assert all(name in result.stderr for name in variables)
    assert result.stdout == ""


def test_help_names_every_variable_that_is_read(marked: Any) -> None:
    result = launch(marked, "--help")
    assert result.returncode == 0
    body = Path(SCRIPT).read_text().partition("\nHELP\n}")[2]
    names = set(re.findall(r"\$\{(CHUNKGRAPH_[A-Z_]+)", body))
    assert len(names) == 4
    assert names == set(re.findall(r"CHUNKGRAPH_[A-Z_]+", result.stdout))


@pytest.mark.slow
@needs_megatron
def test_a_configuration_trains_in_the_ranks_and_reports_once(marked: Any, tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    result = launch(marked, CONFIG, *SMALL, "--json", str(table), "run.timeout_s=60")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("parameters after the run: equal") == 1
    assert result.stdout.endswith("OK\n")
    assert result.stderr.count("chunk graphs: step 2/2  3 microbatches") == 1
    content = json.loads(table.read_text())
    assert content["ok"] is True
    assert [step["num_microbatches"] for step in content["steps"]] == [2, 3]
    assert content["config"]["run"]["timeout_s"] == 60
    assert marked.is_alone()


@pytest.mark.slow
@needs_megatron
def test_ranks_that_do_not_fit_the_configuration_are_one_error(marked: Any) -> None:
    result = launch(marked, CONFIG, num_ranks=3)
    assert result.returncode == 2
    assert result.stderr.count("error: ") == 1
    assert "needs 2 processes (pipeline 2 x tensor 1 x context 1 x data 1)" in result.stderr
    assert "the job was started with 3" in result.stderr
    # Python 3.11 may lose a race in its own `_after_fork`, which it reports and ignores.
    num_ignored = result.stderr.count("Exception ignored in: <function _after_fork")
    assert result.stderr.count("Traceback") == num_ignored
    assert marked.is_alone()


def test_a_script_gets_its_arguments_and_its_exit_code_comes_back(
    marked: Any, tmp_path: Path
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        # One write, so that the ranks' lines do not mix.
        "line = f\"{os.environ['RANK']} {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\"\n"
        "os.write(1, line.encode())\n"
        # When one rank fails, the launcher ends the others, but not before they have written.
        "mark = pathlib.Path(__file__).with_suffix('.written')\n"
        "mark.touch() if os.environ['RANK'] == '0' else None\n"
        "while not mark.exists(): time.sleep(0.05)\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    result = launch(marked, str(script), "--train-iters", "2", "a b")
    assert result.returncode == 3
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"{rank} 2 ['--train-iters', '2', 'a b']" for rank in (0, 1)]
    assert "rank 1 was the first to fail; exit code 3" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("kind", "signals", "code"),
    [
        pytest.param("meek", [signal.SIGINT], 130, marks=pytest.mark.slow),
        ("meek", [signal.SIGTERM], 143),
        # torchrun resumes waiting after the second signal, and would leave ranks after the third.
        pytest.param("stubborn", [signal.SIGINT] * 3, 130, marks=pytest.mark.slow),
    ],
)
def test_signals_leave_no_process(
    marked: Any,
    tmp_path: Path,
    wait_until: Callable[..., None],
    kind: str,
    signals: list[signal.Signals],
    code: int,
) -> None:
    script = tmp_path / "hang.py"
    script.write_text(HANG)
    log = tmp_path / "log"
    with log.open("w") as output:
        command = subprocess.Popen(
            [SCRIPT, str(script), str(tmp_path), kind],
            cwd=marked.folder,
            env=environment(marked),
            stderr=output,
        )
    try:
        wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
        for number, signum in enumerate(signals, start=1):
            command.send_signal(signum)
            if number < len(signals):
                expected = 2 * number
                wait_until(lambda: log.read_text().count("closing signal") >= expected)  # noqa: B023
                assert len(marked.processes()) == 3
        command.wait(20)
    finally:
        command.kill()
    assert command.returncode == code
    assert "Traceback" not in log.read_text()
    assert marked.is_alone()

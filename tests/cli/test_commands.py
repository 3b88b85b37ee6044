from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import finished, output_of_python
from training_needs import HAS_MEGATRON

from chunkgraph.cli.__main__ import main
from chunkgraph.settings import Config, load_config, resolved, settings_of, to_mapping

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parents[1] / "support" / "workers"
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_vpp2_cpu.yaml")

pytestmark = pytest.mark.timeout(120)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{WORKERS}{os.pathsep}{ROOT}", "COLUMNS": "80"}


def train(behaviour: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``chunkgraph train`` with a stand-in of a chosen behaviour; see ``driver.py``."""
    driver = str(WORKERS / "driver.py")
    return finished([sys.executable, driver, behaviour, "train", CONFIG, *arguments], environment())


def test_help_and_version() -> None:
    printed = output_of_python("-m", "chunkgraph.cli", "--help")
    assert "plan" in printed
    assert "train" in printed
    assert output_of_python("-m", "chunkgraph.cli", "--version") == "chunkgraph 0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["plan"], "for example: chunkgraph plan --pp 4"),
        (["plan", "--pp", "4", "--schedule", "zbh1"], "Did you mean 'zb-h1'?"),
        (["train"], "required: CONFIG\n"),
        (["config", CONFIG, "--schema"], "leave out CONFIG"),
        (["train", CONFIG, "--fast"], "unrecognized arguments: --fast"),
        (["train", CONFIG, "--debug", "model.num_layers=6"], "not divisible by 4 stages"),
        (["train", CONFIG, "model.layer_spec=transformer_engine"], "runs on GPUs only"),
        (["train", CONFIG, "data.path=none.txt"], "none.txt: cannot read the text of data.path"),
        (["train", CONFIG, "--json", "none/x.json"], "does not exist"),
        (["train", CONFIG, "device=cuda", "pipeline.data_parallel_size=64"], "needs 128 GPUs"),
    ],
)
def test_bad_usage_ends_with_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:  # what argparse itself refuses
        code = end.code
    assert code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err or "--debug" in arguments
    assert printed.out == ""


def test_a_command_imports_nothing_of_the_others() -> None:
    code = "import sys; from chunkgraph.cli.__main__ import _parse; "
    code += "_parse(['launch', 'script.py']); print(*sys.modules)"
    modules = set(output_of_python("-c", code).split())
    assert "chunkgraph.cli.launch" in modules
    # Not `data` and `schedules`: the settings check counts of documents and schedules with them.
    assert not modules & {"rich", "torch", "chunkgraph.cli.train", "chunkgraph.cli.plan"}


@pytest.mark.skipif(not HAS_MEGATRON, reason="the command insists on megatron-core")
class TestTrain:
    """With stand-in workers, which need no Megatron themselves."""

    def test_success(self, tmp_path: Path) -> None:
        table = tmp_path / "table.json"
        result = train("{}", "--json", str(table), "run.timeout_s=50")
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("chunk graphs: step 6/6  4 microbatches, loss 5.123457") == 1
        assert "parameters after the run: equal (10 compared, all ranks)" in result.stdout
        assert "step 1 ran eagerly: capture warmup" in result.stdout
        assert result.stdout.count("equal") == 7
        assert result.stdout.endswith("OK\n")
        assert max(map(len, result.stdout.splitlines())) <= 80
        content = json.loads(table.read_text())
        assert content["ok"] is True
        config = content["config"]  # as resolved
        assert config["run"]["timeout_s"] == 50
        assert config["model"]["layer_spec"] == "local"
        assert config["pipeline"]["microbatch_group_size_per_vp_stage"] == 2
        assert content["steps"][0]["loss"] == 5.123456789
        assert [path.name for path in tmp_path.iterdir()] == ["table.json"]

    def test_a_broken_promise_ends_with_1(self, tmp_path: Path) -> None:
        changes = {"last_step": {"loss": 5.123456788, "different": ["loss"]}}
        table = tmp_path / "table.json"
        result = train(json.dumps(changes), "--json", str(table))
        assert result.returncode == 1
        assert "FAILED: 1 problem" in result.stdout
        message = "step 6: the losses differ: 5.123456788 captured, 5.123456789 eager"
        assert message in " ".join(result.stdout.split())
        assert "error: Rank 0 failed: the report lists 1 problem" in result.stderr
        assert json.loads(table.read_text())["ok"] is False

    @pytest.mark.parametrize(
        ("signum", "code"),
        [
            pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
            (signal.SIGTERM, 143),
            pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
        ],
    )
    def test_no_worker_outlives_the_command(
        self, tmp_path: Path, signum: signal.Signals, code: int, has_ended: Callable[[int], bool]
    ) -> None:
        command = subprocess.Popen(
            [sys.executable, str(WORKERS / "driver.py"), "hang", "train", CONFIG],
            env={**environment(), "STUB_FOLDER": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            pids = worker_pids(tmp_path)
            command.send_signal(signum)
            _, errors = command.communicate(timeout=20)
        finally:
            command.kill()
        assert command.returncode == code
        assert "Traceback" not in errors
        if signum is signal.SIGINT:
            assert errors.count("interrupted: the run was stopped") == 1
        assert all(has_ended(pid) for pid in pids)


def worker_pids(run_dir: Path, within_s: float = 60.0) -> list[int]:
    """Wait for both workers to start; return their process ids."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in run_dir.glob("pid*")]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.05)
    pytest.fail("the workers did not start")


# `chunkgraph config`: all settings, those of a file, and the schema.


def _print(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_of_the_documentation_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    assert _print(capsys) == page
    for item in settings_of(Config):
        assert f"\n`{item.name}` | " in page


def test_a_file_is_printed_as_it_is_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    printed = yaml.safe_load(_print(capsys, CONFIG, "train.lr=0.5"))
    assert printed == to_mapping(resolved(load_config(CONFIG, ["train.lr=0.5"])))
    assert printed["train"]["lr"] == 0.5
    assert printed["pipeline"]["microbatch_group_size_per_vp_stage"] == 2


def test_the_schema_knows_what_the_loader_knows(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(_print(capsys, "--schema"))
    sections: dict[str, Any] = {
        name: schema["$defs"][part["$ref"].rpartition("/")[2]]
        for name, part in schema["properties"].items()
        if "$ref" in part
    }
    for item in settings_of(Config):
        section, _, name = item.path.rpartition(".")
        described = (sections[section] if section else schema)["properties"][name]
        assert " ".join(described["description"].split()) == item.help
        assert all(f'"{choice}"' in json.dumps(described) for choice in item.choices)
    lr = sections["train"]["properties"]["lr"]
    assert (lr["type"], lr["exclusiveMinimum"], lr["default"]) == ("number", 0, 0.001)
    assert "required" not in schema
    assert set(schema["properties"]) == {*Config.model_fields, "extends"}
    assert schema["additionalProperties"] is False

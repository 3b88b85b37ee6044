"""A wrong command line or file, Ctrl-C, a closed pipe and a full disk end in one message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import python

from chunkgraph.cli.__main__ import main

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")

pytestmark = pytest.mark.usefixtures("restored_sigterm")


def chunkgraph(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "chunkgraph.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plna"], "Did you mean 'plan'?"),
        (["launch", "--nproc_per_node", "2", "x.py"], "Did you mean '--nproc-per-node'?"),
        (["plan", "--pp", "two"], "invalid int value: 'two'"),
        (["plan", "--gpu-memory", "80"], "is not a size; write it as 80GiB"),
        (["plan", "--gpu-memory", "9" * 400 + "GiB"], "GiB' is not a size; write it as 80GiB"),
        (["plan", "--svg", "x/"], "x/ is a folder"),
        (["plan", "--json", "run.yaml"], "Put it before --json"),
    ],
)
def test_a_wrong_flag_is_named_with_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--plan", "--gpu-memory=80GiB", "--nproc_per_node"])
def test_the_option_after_the_script_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    script = tmp_path / "pretrain.py"
    script.touch()
    assert main(["launch", str(script), option]) == 2
    assert f"{option.partition('=')[0]} belongs before the script" in capsys.readouterr().err


def test_a_schedule_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--pp", "2", "--schedule", "zbh1"]) == 2
    assert "Did you mean 'zb-h1'?" in capsys.readouterr().err


def test_a_key_of_another_section_that_is_only_similar_is_not_suggested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
    assert main(["plan", config, "train.num_steps=40"]) == 2
    assert "Did you mean" not in capsys.readouterr().err
    assert main(["plan", config, "train.num_warmup_step=2"]) == 2
    assert "Did you mean 'capture.num_warmup_steps'?" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chunkgraph.cli.__main__.import_module", interrupted)
    assert main(["plan", "--pp", "2"]) == 130
    assert capsys.readouterr().err.startswith("interrupted: ")


def test_ctrl_c_before_the_command_begins_prints_nothing() -> None:
    code = """
import runpy, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "chunkgraph.cli.arguments":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
runpy.run_module("chunkgraph.cli", run_name="__main__")
"""
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = chunkgraph("plan", "--pp", "2", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("options", "where"),
    [((), "reading or writing"), (("--json", "-"), "plan: --json -: cannot be written")],
)
def test_a_full_disk_is_one_line(options: tuple[str, ...], where: str) -> None:
    with FULL.open("w") as full:
        done = chunkgraph("plan", "--pp", "2", *options, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {where}: No space left on device")
    assert done.stderr.count("\n") == 1


def test_a_picture_alone_is_on_standard_output() -> None:
    done = chunkgraph("plan", "--pp", "2", "--svg", "-", stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert done.stdout.startswith("<svg")
    assert done.stdout.endswith("</svg>\n")
    assert "slots for any legal number" in done.stderr


def test_a_shell_completes_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for argcomplete, which ends the process as the real one does."""
    parsers = []

    def autocomplete(parser: object) -> None:
        parsers.append(parser)
        raise SystemExit(0)

    monkeypatch.setenv("_ARGCOMPLETE", "1")
    module = SimpleNamespace(autocomplete=autocomplete, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "argcomplete", module)
    with pytest.raises(SystemExit):
        main([])
    assert all(name in parsers[0].format_help() for name in ("plan", "launch", "doctor"))

"""A wrong command line or file, Ctrl-C, a closed pipe and a full disk end in one message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunkgraph._outputs import check_output, is_stdout, stream_next_to, write_output
from chunkgraph.cli.__main__ import main
from chunkgraph.errors import ConfigError

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
        (["plan", "--json", "run.yaml"], "Name one, or - for standard output"),
        (["launch", "--compare", "2", "--json", "x.py", "--mock-data"], "x.py is not a file"),
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


def test_ctrl_c_while_a_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chunkgraph.cli.__main__.import_module", interrupted)
    assert main(["plan", "--pp", "2"]) == 130
    assert capsys.readouterr().err.startswith("interrupted: ")


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


# Results are checked before the run, and are not lost with a full disk.


def write(path: Path, content: str | bytes = "new") -> None:
    check_output("--json", path)
    write_output("--json", path, content)


def test_a_file_or_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "result.json", tmp_path / "link"
    link.symlink_to("result.json")
    check_output("--json", link)
    assert not path.exists()
    write(link, "something longer")
    assert path.read_text() == "something longer"
    write(path, b"new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "result.json"]


def test_what_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    for name, problem in {
        "folder": "is a folder",
        "missing/file": "missing does not exist",
        "file/file": "does not exist",
        "x" * 300: "File name too long",
        "a\0b": "embedded null",
    }.items():
        with pytest.raises(ConfigError, match=problem) as error:
            check_output("--json", tmp_path / name)
        assert str(error.value).startswith("--json ")
        assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "old"


def test_standard_output_is_a_dash_and_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    with own.open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for path in (Path("-"), own, Path(f"/dev/fd/{stream.fileno()}")):
            assert is_stdout(path)
            assert stream_next_to(None, path) is sys.stderr
            write(path)
        assert not is_stdout(tmp_path)
        assert stream_next_to(None, tmp_path / "other") is stream
    assert own.read_text() == "newnewnew"
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ConfigError, match="standard output is closed"):
        check_output("--json", Path("-"))

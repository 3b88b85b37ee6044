"""Results never replace a device, a link or a folder, and are not lost with a full disk."""

from __future__ import annotations

import io
import socket
import stat
import sys
from pathlib import Path

import pytest

from chunkgraph._outputs import (
    check_output,
    is_stdout,
    stream_next_to,
    write_output,
)
from chunkgraph.errors import ConfigError, OutputError

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


def write(path: Path, content: str | bytes = "new") -> None:
    check_output("--json", path)
    write_output("--json", path, content)


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write(path, "first")
    assert path.read_text() == "first"
    path.chmod(0o640)
    before = path.stat().st_ino
    write(path, b"second")
    assert path.read_text() == "second"
    assert path.stat().st_ino != before
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "other").mkdir()
    target, link = tmp_path / "other" / "target", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to(Path("other") / "target")
    write(link)
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["link", "other", "target"]


def test_what_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "lost").symlink_to(Path("missing") / "file")
    with socket.socket(socket.AF_UNIX) as bound:
        monkeypatch.chdir(tmp_path)  # a socket's name must be short
        bound.bind("socket")
    for name, problem in {
        "folder": "is a folder",
        "folder/..": "is a folder",
        "socket": "is a socket",
        "loop": "Too many levels of symbolic links",
        "lost": "missing does not exist",
        "missing/file": "missing does not exist",
        "file/file": "Not a directory",
        "x" * 300: "File name too long",
        "a\0b": "embedded null",
    }.items():
        with pytest.raises(ConfigError, match=problem) as error:
            check_output("--json", tmp_path / name)
        assert str(error.value).startswith("--json ")
        assert "\n" not in str(error.value)
    assert (tmp_path / "file").read_text() == "old"


def test_a_file_that_cannot_be_renamed_over_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is mounted into a container is one."""

    def busy(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    path = tmp_path / "result.json"
    path.write_text("something longer")
    monkeypatch.setattr(Path, "replace", busy)
    write(path)
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


@needs_full
def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(FULL)
    check_output("--json", link)
    with pytest.raises(OutputError, match=r"--json .*link: cannot be written: No space left"):
        write_output("--json", link, "new")


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
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not is_stdout(own)

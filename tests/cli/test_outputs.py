"""Results are checked before the run, and are not lost with a full disk."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from chunkgraph._outputs import check_output, is_stdout, stream_next_to, write_output
from chunkgraph.errors import ConfigError, OutputError

FULL = Path("/dev/full")


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


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
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

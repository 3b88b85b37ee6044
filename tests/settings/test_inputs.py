"""Every file that a user names is regular, limited, and named without raw escapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chunkgraph.cli.__main__ import main
from chunkgraph.data import read_documents
from chunkgraph.errors import ConfigError
from chunkgraph.packing import read_lengths
from chunkgraph.schedules import read_schedule
from chunkgraph.settings import load_config

READERS: dict[str, Callable[[str], object]] = {
    "a.yaml": load_config,
    "a.csv": read_schedule,
    "a.npy": lambda name: read_lengths(Path(name)),
    "a.idx": lambda name: read_lengths(Path(name)),
    "lengths": lambda name: read_lengths(Path(name)),
    "text": read_documents,
}
RAW = "\x1b[31m\r\x07"

pytestmark = pytest.mark.usefixtures("restored_sigterm")


@pytest.mark.parametrize("name", READERS)
def test_a_device_and_a_pipe_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is not a regular file"):
        READERS[name](str(path))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is not a regular file"):
        READERS[name](str(path))


@pytest.mark.parametrize("name", [name for name in READERS if name != "a.idx"])
def test_a_huge_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(ConfigError, match=r"it is larger than \d+ bytes"):
        READERS[name](str(path))


def test_an_array_that_claims_more_than_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (10**13,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ConfigError, match="not an array of numbers"):
        read_lengths(path)
    path.write_bytes(b"PK\x03\x04 an archive")
    with pytest.raises(ConfigError, match="not an array of numbers"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('model:\n  "a\\e[31m\\r\\ab": 1\n', ["plan", "a.yaml"]),
        ('extends: "a\\e[31m\\r\\a.yaml"\n', ["plan", "a.yaml"]),
        (f"12\n{RAW}\n", ["packing", "a.yaml"]),
        ("", ["packing", f"{RAW}.npy"]),
        ("", ["plan", "--schedule", f"{RAW}.csv"]),
        ("", ["launch", f"{RAW}.py"]),
        ("", ["plan", "--pp", "2", f"--{RAW}"]),
    ],
)
def test_escapes_of_a_user_do_not_reach_the_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    try:
        code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    printed = "".join(capsys.readouterr())
    assert code == 2
    assert "\\x1b[31m" in printed
    assert set(printed) & set(RAW) <= set("[31m")

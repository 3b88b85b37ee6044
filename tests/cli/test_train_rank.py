from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import python

from chunkgraph.errors import CaptureError, ConfigError, TopologyError
from chunkgraph.jobs import processes
from chunkgraph.launch import __main__ as launch

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")


def test_the_command_takes_a_started_process_for_a_rank() -> None:
    result = python("-m", "chunkgraph.cli", "train", CONFIG, RANK="0", WORLD_SIZE="2")
    assert result.returncode == 1
    assert "error: Rank 0 failed: " in result.stderr
    assert "MASTER_ADDR expected, but not set" in result.stderr


def test_a_single_process_meets_nobody_at_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    ports = []
    for _ in range(2):
        os.environ.clear()
        launch._set_rank_variables()
        ports.append(int(os.environ["MASTER_PORT"]))
        socket.create_server(("127.0.0.1", ports[-1])).close()
    assert 29500 not in ports


@pytest.mark.parametrize(
    ("number", "error", "code", "message", "waits"),
    [
        # A wrong setting is nobody's fault.
        (0, TopologyError("No such pipeline."), 2, "error: No such pipeline.\n", False),
        # Those who know less wait for those who know more.
        (1, ConfigError("No such file."), 2, "error: Rank 1 failed: No such file.\n", True),
        (2, RuntimeError("Connection reset by peer"), 1, "another rank ended", True),
        (3, CaptureError("model.py:12: .item()"), 1, "Rank 3 failed: model.py:12: .item()", False),
        (3, ZeroDivisionError("one"), 1, "error: Rank 3 failed: ZeroDivisionError: one", False),
    ],
)
def test_which_rank_prints_an_error_and_when(
    number: int,
    error: Exception,
    code: int,
    message: str,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> int:
        raise error

    waited: list[float] = []
    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=waited.append))
    monkeypatch.setenv("RANK", str(number))
    monkeypatch.setenv("LOCAL_RANK", str(number % 2))
    assert processes.run_rank(work, debug=False) == code
    assert message in capsys.readouterr().err
    assert len(waited) == waits

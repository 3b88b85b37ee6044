from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunkgraph.errors import CaptureError, ConfigError, TopologyError
from chunkgraph.jobs import processes

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")


def test_the_command_takes_a_started_process_for_a_rank() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "chunkgraph.cli", "train", CONFIG],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "error: Rank 0 failed: " in result.stderr
    assert "MASTER_ADDR expected, but not set" in result.stderr


class TestErrors:
    """Which rank prints an error, and when."""

    @pytest.fixture(autouse=True)
    def _no_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited = 0

        def wait(_seconds: float) -> None:
            self.waited += 1

        monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=wait))
        self.setenv = monkeypatch.setenv

    def report(self, number: int, error: Exception) -> int:
        def work() -> int:
            raise error

        self.setenv("RANK", str(number))
        self.setenv("LOCAL_RANK", str(number % 2))
        return processes.run_rank(work, debug=False)

    def test_a_wrong_setting_is_nobodys_fault(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.report(0, TopologyError("No such pipeline.")) == 2
        assert capsys.readouterr().err == "error: No such pipeline.\n"
        assert self.waited == 0

    @pytest.mark.parametrize(
        ("number", "error", "code", "message"),
        [
            (1, ConfigError("No such file."), 2, "error: Rank 1 failed: No such file.\n"),
            (2, RuntimeError("Connection reset by peer"), 1, "another rank ended"),
        ],
    )
    def test_those_who_know_less_wait_but_are_heard(
        self,
        capsys: pytest.CaptureFixture[str],
        number: int,
        error: Exception,
        code: int,
        message: str,
    ) -> None:
        assert self.report(number, error) == code
        assert message in capsys.readouterr().err
        assert self.waited == 1

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (CaptureError("model.py:12: .item()"), "error: Rank 3 failed: model.py:12: .item()"),
            (ZeroDivisionError("one"), "error: Rank 3 failed: ZeroDivisionError: one"),
        ],
    )
    def test_a_cause_is_printed_at_once(
        self, capsys: pytest.CaptureFixture[str], error: Exception, message: str
    ) -> None:
        assert self.report(3, error) == 1
        assert message in capsys.readouterr().err
        assert self.waited == 0

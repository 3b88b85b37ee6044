from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkgraph.cli import train_rank
from chunkgraph.cli.train_rank import StartedRank
from chunkgraph.errors import CaptureError, ConfigError, TopologyError

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
JOB = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_a_process_of_its_own_is_no_rank(environment: dict[str, str]) -> None:
    assert StartedRank.from_environment(environment) is None


def test_the_place_in_the_job_is_read() -> None:
    local = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    expected = StartedRank(rank=3, world_size=4, local_rank=1, local_world_size=2)
    assert StartedRank.from_environment({**JOB, **local}) == expected
    # Without these variables, all ranks count as on one machine.
    expected = StartedRank(rank=3, world_size=4, local_rank=3, local_world_size=4)
    assert StartedRank.from_environment(JOB) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "unset RANK and WORLD_SIZE"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1' in the environment"),
    ],
)
def test_a_half_started_job_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StartedRank.from_environment({**JOB, **change})


def test_the_command_takes_a_started_process_for_a_rank(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "chunkgraph.cli", "train", CONFIG, "--run-dir", str(tmp_path / "x")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "taken for one rank of a job, but MASTER_ADDR is not set" in result.stderr
    assert list(tmp_path.iterdir()) == []


class TestErrors:
    """Which rank prints an error, and when."""

    @pytest.fixture(autouse=True)
    def _no_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited = 0

        def wait() -> None:
            self.waited += 1

        monkeypatch.setattr(train_rank, "_wait_for_the_launcher", wait)

    def report(self, rank: int, error: Exception) -> int:
        started = StartedRank(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2)
        return train_rank._report_error(argparse.Namespace(debug=False), started, error)

    def test_a_wrong_setting_is_nobodys_fault(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.report(0, TopologyError("No such pipeline.")) == 2
        assert capsys.readouterr().err == "error: No such pipeline.\n"
        assert self.waited == 0

    @pytest.mark.parametrize(
        ("rank", "error", "code", "message"),
        [
            (1, ConfigError("No such file."), 2, "error: Rank 1 failed: No such file.\n"),
            (2, RuntimeError("Connection reset by peer"), 1, "another rank ended"),
        ],
    )
    def test_those_who_know_less_wait_but_are_heard(
        self,
        capsys: pytest.CaptureFixture[str],
        rank: int,
        error: Exception,
        code: int,
        message: str,
    ) -> None:
        assert self.report(rank, error) == code
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

"""Every schedule class that splits a rank's layers or backwards, on GPUs: equal to eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULES = (
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


@pytest.mark.multigpu
@pytest.mark.timeout(240)
def test_twelve_blocks_under_every_schedule(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """One job for all cases: bfloat16, deterministic kernels, poisoned scratch.

    One capture serves all numbers of microbatches, with evaluations in between.
    """
    path = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "benchmarks/torch_pipelines.py"),
            *("--layers-per-rank", "6", "--width", "512", "--num-heads", "8"),
            *("--sequence", "256", "--num-steps", "5", "--time-limit", "40"),
            *("--num-microbatches", "4", "8", "6", "4", "--evaluate"),
            *("--verify", "poison", "--schedules", *SCHEDULES, "--json", str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=210,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["schedules"]
    assert [row["schedule"] for row in rows] == list(SCHEDULES)
    for row in rows:
        assert row["equal_to_eager"] is True, row["schedule"]
        assert row["equal_to_eager_1f1b"] is True, row["schedule"]
        for counters in row["graphs"]["counters_by_rank"]:
            assert counters["replayed_steps"] == 7
            assert counters["capture_sessions"] == 1

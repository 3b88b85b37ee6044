"""The benchmark of torch's pipeline schedules runs, and compares what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SIZES = {
    "cpu": ("--layers-per-rank", "2", "--width", "32", "--num-heads", "2", "--sequence", "16"),
    "cuda": ("--layers-per-rank", "2", "--width", "512", "--num-heads", "4", "--sequence", "256"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_schedules_with_graphs_are_measured_and_equal(
    device: str, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    path = tmp_path / "result.json"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    names = ["Schedule1F1B", "ScheduleZBVZeroBubble"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), "benchmarks/torch_pipelines.py"),
            *("--schedules", *names, "--num-microbatches", "4", "--num-steps", "2"),
            *(*_SIZES[device], "--json", str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **hidden},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    assert document["num_ranks"] == 2
    assert [row["schedule"] for row in document["schedules"]] == names
    for row, num_stages in zip(document["schedules"], (1, 2), strict=True):
        assert row["equal_to_eager"] is True
        assert row["equal_to_eager_1f1b"] is True
        for part in ("eager", "graphs"):
            assert len(row[part]["step_ms_all"]) == 2
            assert row[part]["step_ms"] > 0
        for counters in row["graphs"]["counters_by_rank"]:
            # Of five steps one warms up; the others have four microbatches.
            assert counters["replayed_steps"] == 4
            assert counters["replays"] == counters["backward_replays"] == 16 * num_stages
            assert counters["weight_replays"] == (32 if num_stages == 2 else 0)
        assert row["eager"]["counters_by_rank"] == [{}, {}]
        assert row["schedule"] in done.stdout

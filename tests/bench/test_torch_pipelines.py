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
        assert ("reserved_of_eager" in row) is (device == "cuda")


def _run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "benchmarks/torch_pipelines.py", *_SIZES["cpu"], *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **alone},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.timeout(120)
def test_a_schedule_beyond_its_time_limit_leaves_the_earlier_ones(
    tmp_path: Path, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    path = tmp_path / "result.json"
    names = ("Schedule1F1B", "ScheduleGPipe")
    done = _run_alone("--schedules", *names, "--num-steps", "2", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["schedules"]
    limit = "0.01"  # too short for the first one
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    ended = _run_alone("--schedules", *names, "--time-limit", limit)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in _compare" in ended.stderr  # where it was
    assert [row["schedule"] for row in rows] == list(names)


@pytest.mark.timeout(120)
def test_a_stage_is_timed_and_simulated(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = _run_alone("--simulate", "--json", str(path))
    assert done.returncode == 0, done.stderr
    row = json.loads(path.read_text())["stages"][-1]
    assert row["layers"] == "torch"
    # Four linear layers in each of two: none is computed twice, or left out.
    assert row["num_gemms"] == {"F": 8, "B": 16, "I": 8, "W": 8}
    costs = row["costs_ms"]
    assert row["halves_of_backward"] == (costs["I"] + costs["W"]) / costs["B"]
    assert list(row["share_of_1f1b"]) == ["2,8", "4,8", "4,16", "8,16"]
    for shares in row["share_of_1f1b"].values():
        assert shares["1f1b"] == 1
        assert 0.5 < shares["interleaved"] < 1

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
PROGRAM = ROOT / "benchmarks" / "torch_pipelines.py"
_SIZES = {
    "cpu": ("--layers-per-rank", "2", "--width", "32", "--num-heads", "2", "--sequence", "16"),
    "cuda": ("--layers-per-rank", "2", "--width", "512", "--num-heads", "4", "--sequence", "256"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_schedules_with_graphs_are_measured_and_equal(
    device: str,
    tmp_path: Path,
    free_port: Callable[[], int],
    run_script: Callable[..., tuple[list[int], str]],
) -> None:
    path = tmp_path / "result.json"
    names = ["Schedule1F1B", "ScheduleZBVZeroBubble"]
    command = [
        *(PROGRAM, "--schedules", *names, "--num-microbatches", "4", "2", "--num-steps", "2"),
        "--evaluate",
        *(*_SIZES[device], "--json", str(path)),
    ]
    if device == "cpu":
        codes, output = run_script(*command)
        assert codes == [0, 0], output
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*torchrun, "--master-port", str(free_port()), *command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        output = done.stdout
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
            # Of five steps one warms up; the others have 2, 4, 2 and 4 microbatches.
            assert counters["replayed_steps"] == 4
            assert counters["replays"] == counters["backward_replays"] == 12 * num_stages
            assert counters["weight_replays"] == (24 if num_stages == 2 else 0)
        assert row["eager"]["counters_by_rank"] == [{}, {}]
        assert row["schedule"] in output
        assert ("reserved_of_eager" in row) is (device == "cuda")


@pytest.fixture
def run_alone(
    run_script: Callable[..., tuple[list[int], str]],
) -> Callable[..., tuple[int, str]]:
    """Return a runner of the benchmark in one rank on a CPU: exit code and output."""

    def run(*arguments: str) -> tuple[int, str]:
        (code,), output = run_script(PROGRAM, *_SIZES["cpu"], *arguments, num_ranks=1)
        return code, output

    return run


@pytest.mark.timeout(120)
def test_a_schedule_beyond_its_time_limit_leaves_the_earlier_ones(
    tmp_path: Path, run_alone: Callable[..., tuple[int, str]]
) -> None:
    path = tmp_path / "result.json"
    names = ("Schedule1F1B", "ScheduleGPipe")
    code, output = run_alone("--schedules", *names, "--num-steps", "2", "--json", str(path))
    assert code == 0, output
    rows = json.loads(path.read_text())["schedules"]
    limit = "0.01"  # too short for the first one
    code, output = run_alone("--schedules", *names, "--time-limit", limit)
    assert code == 1
    assert "Timeout" in output
    assert "in _compare" in output  # where it was
    assert [row["schedule"] for row in rows] == list(names)


@pytest.mark.timeout(120)
def test_a_stage_is_timed_and_simulated(
    tmp_path: Path, run_alone: Callable[..., tuple[int, str]]
) -> None:
    path = tmp_path / "result.json"
    code, output = run_alone("--simulate", "--json", str(path))
    assert code == 0, output
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

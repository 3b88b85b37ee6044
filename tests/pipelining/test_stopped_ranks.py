"""A rank that is stopped is named, and its job ends within the timeout and 30 s."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TORCHRUN, output_of_python
from torch_release import HAS_LOCAL_STAGES

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("stopping_ranks.py")
CLASSES = ["Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"]
CLASSES += ["ScheduleInterleavedZeroBubble", *["ScheduleZBVZeroBubble"] * HAS_LOCAL_STAGES]
LIMIT_S = 6 + 30  # the timeout of the jobs and 30 s
NUM_MOMENTS = 3  # warmup, capture, replay; and for one class, the start
SILENT = "No word from rank 1: stopped, hung or ended."
NO_STORE = "ank 0 serves it, or torchrun."  # the job's store, which does not answer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_under_every_class_in_every_part_of_a_job(tmp_path: Path) -> None:
    lines = output_of_python(PROGRAM, tmp_path, *CLASSES, timeout_s=300).splitlines()
    assert len(lines) == (len(CLASSES) * NUM_MOMENTS + 1) * 2
    assert not [line for line in lines if float(line.split(",")[-1]) >= LIMIT_S], lines
    for line in lines:
        case = line.split(",")[:-1]
        error = (tmp_path / " ".join(case)).read_text()
        assert error.endswith(SILENT if case[-1] == "1" else NO_STORE), f"{line}: {error}"


def test_torchrun_ends_a_script_without_waiting_for_it(free_port: Callable[[], int]) -> None:
    arguments = [str(free_port()), str(PROGRAM), "ScheduleGPipe", "replay", "1"]
    with subprocess.Popen(
        [sys.executable, *TORCHRUN, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stderr is not None
            next(line for line in job.stderr if line.startswith("stops now"))
            start = time.monotonic()
            rest = job.stderr.read()
        finally:
            job.terminate()
    assert time.monotonic() - start < LIMIT_S
    assert SILENT in rest
    assert "a rank that is stopped" in rest

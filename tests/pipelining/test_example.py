"""The example runs as it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch_pipelining.py"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_the_example_is_equal_to_eager(device: str, free_port: Callable[[], int]) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--master-port", str(free_port()), EXAMPLE],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1]), **hidden},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses equal to eager: True") == 2
    assert "captures=2," in done.stdout
    assert "captures=1," in done.stdout
    assert len([line for line in EXAMPLE.read_text().splitlines() if line.strip()]) <= 60

"""The examples run and print the documented results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


def _output(name: str, device: str, port: int) -> str:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--master-port", str(port), EXAMPLES / name],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), **hidden},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_the_example_is_equal_to_eager(device: str, free_port: Callable[[], int]) -> None:
    output = _output("torch_pipelining.py", device, free_port())
    assert output.count("losses equal to eager: True") == 2
    assert "captures=2," in output
    assert "captures=1," in output
    lines = (EXAMPLES / "torch_pipelining.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_stages_of_torchtitan_are_equal_to_eager(device: str, free_port: Callable[[], int]) -> None:
    output = _output("torchtitan_stages.py", device, free_port())
    assert output.count("losses equal to eager: True") == 4
    # On ranks 0 and 1, 1F1B has 2 and 1 slots, ZBV 4 + 1 and 3 + 2; three of four steps replay.
    for line, captures, replays in [
        ("rank 0: 1F1B", 2, 12),
        ("rank 1: 1F1B", 1, 12),
        ("rank 0: ZBVZeroBubble", 5, 24),
        ("rank 1: ZBVZeroBubble", 5, 24),
    ]:
        # Lines of two processes may follow each other without a line break.
        (counters,) = re.findall(f"{line}: (.*?); losses", output)
        assert f"captures={captures}, " in counters
        assert f" replays={replays}, " in counters

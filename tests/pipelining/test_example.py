"""The examples run and print the documented results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule
from torch_release import HAS_LOCAL_STAGES

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


@pytest.fixture
def output_of(
    run_script: Callable[..., tuple[list[int], str]], free_port: Callable[[], int]
) -> Callable[[str, str], str]:
    """Return the output of an example on two CPU ranks, or two GPUs by torchrun."""

    def output_of(name: str, device: str) -> str:
        if device == "cpu":
            codes, output = run_script(EXAMPLES / name)
            assert codes == [0, 0], output
            return output
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*torchrun, "--master-port", str(free_port()), EXAMPLES / name],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent)},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return output_of


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_the_example_is_equal_to_eager(device: str, output_of: Callable[[str, str], str]) -> None:
    output = output_of("torch_pipelining.py", device)
    assert output.count("losses equal to eager: True") == 2
    assert "captures=2," in output
    assert "captures=1," in output
    lines = (EXAMPLES / "torch_pipelining.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_stages_of_torchtitan_are_equal_to_eager(
    device: str, output_of: Callable[[str, str], str]
) -> None:
    output = output_of("torchtitan_stages.py", device)
    has_v = device == "cuda" or HAS_LOCAL_STAGES
    assert output.count("losses equal to eager: True") == (4 if has_v else 2)
    is_sharded = hasattr(FSDPModule, "set_keep_unsharded_storage")
    assert ("sharded over 1" if is_sharded else "not sharded: FSDP2 needs 2.15") in output

"""The examples run and print the documented results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TORCHRUN, output_of_python
from torch.distributed.fsdp import FSDPModule
from torch_release import HAS_LOCAL_STAGES

EXAMPLES = Path(__file__).parents[2] / "examples"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)]


@pytest.fixture
def output_of(
    run_script: Callable[..., tuple[list[int], str]], free_port: Callable[[], int]
) -> Callable[..., str]:
    """Return the output of an example on two CPU ranks, or two GPUs by torchrun."""

    def output_of(name: str, device: str, *flags: str) -> str:
        if device == "cpu":
            codes, output = run_script(EXAMPLES / name, *flags)
            assert codes == [0, 0], output
            return output
        return output_of_python(*TORCHRUN, str(free_port()), EXAMPLES / name, *flags, timeout_s=180)

    return output_of


@pytest.mark.timeout(200)
@pytest.mark.parametrize("flags", [(), pytest.param(("--lora",), marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", DEVICES)
def test_the_example_is_equal_to_eager(
    device: str, flags: tuple[str, ...], output_of: Callable[..., str]
) -> None:
    if flags:
        pytest.importorskip("peft")
    output = output_of("torch_pipelining.py", device, *flags)
    assert output.count("losses equal to eager: True") == 2
    assert "captures=2," in output
    assert "captures=1," in output
    lines = (EXAMPLES / "torch_pipelining.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_stages_of_torchtitan_are_equal_to_eager(
    device: str, output_of: Callable[..., str]
) -> None:
    """With the package's own model and cuts, if it is installed."""
    output = output_of("torchtitan_stages.py", device)
    has_v = device == "cuda" or HAS_LOCAL_STAGES
    assert output.count("losses equal to eager: True") == (4 if has_v else 2)
    has_package = importlib.util.find_spec("torchtitan") is not None
    assert (", torchtitan: " if has_package else ", without torchtitan: ") in output
    is_sharded = hasattr(FSDPModule, "set_keep_unsharded_storage")
    assert ("sharded over 1" if is_sharded else "not sharded: FSDP2 needs 2.15") in output

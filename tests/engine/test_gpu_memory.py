"""Slots that are too large for the GPU: refused before the capture, or freed after it failed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs, StepMode
from chunkgraph.graphs.cuda_pool import CUDAPool

# These tests measure all of the GPU's memory.
pytestmark = pytest.mark.gpu(alone=True)

ROWS, WIDTH, NUM_LAYERS = 4096, 2048, 6
ACTIVATION_BYTES = ROWS * WIDTH * 4


class Tower(nn.Module):
    """Autograd saves an activation of 32 MiB for each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scales = nn.Parameter(torch.rand(NUM_LAYERS, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = (x * scale).tanh()
        return x


def sample() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(ROWS, WIDTH, device="cuda", generator=generator, requires_grad=True)


def gradient_of(call: object, module: Tower) -> torch.Tensor:
    module.scales.grad = None
    call(sample()).square().mean().backward()  # type: ignore[operator]
    return module.scales.grad.clone()


def test_running_out_in_a_capture_gives_all_of_it_back() -> None:
    """The allocator has its own limit, which the check beforehand does not know."""
    module = Tower()
    expected = gradient_of(module, module)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    _, total = torch.cuda.mem_get_info()
    limit = before + 12 * NUM_LAYERS * ACTIVATION_BYTES
    graphs = ChunkGraphs([module], [40], options=CaptureOptions(on_failure="eager"))
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        with graphs.step(1):
            gradient_of(graphs.callables[0], module)
        step = graphs.step(1)
        with pytest.warns(UserWarning, match="Capturing chunk 0 ran out of memory") as warned:
            mode = step.__enter__()
        assert mode is StepMode.EAGER
        actual = gradient_of(graphs.callables[0], module)
        step.__exit__(None, None, None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "memory" in str(warned[0].message)
    assert torch.equal(actual, expected)
    assert dict(graphs.counters.fallbacks) == {"capture warmup": 1, "capture failed": 1}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 4 * ACTIVATION_BYTES
    graphs.release()
    small = ChunkGraphs([module], [2])
    small.capture([(sample(),)])
    with small.step(1) as mode:
        assert mode is StepMode.REPLAY
        assert torch.equal(gradient_of(small.callables[0], module), expected)


def _large_segments(pool: object) -> list[dict[str, int]]:
    assert isinstance(pool, CUDAPool)
    return [s for s in pool._segments() if s["segment_type"] == "large"]


def test_slots_and_scratch_are_one_block_each() -> None:
    module = Tower()
    graphs = ChunkGraphs([module], [3])
    graphs.capture([(sample(),)])
    pools = graphs._captured.pools
    for pool in pools.slot_pools:  # one copy moves all of a slot but its small tensors
        assert len(_large_segments(pool)) == 1
    large = _large_segments(pools.scratch)
    assert len(large) == 1
    # The gradients before and after an operator, its own temporaries, and a scale's gradient.
    assert 2 * ACTIVATION_BYTES <= large[0]["total_size"] <= 5 * ACTIVATION_BYTES
    with graphs.step(1):
        actual = gradient_of(graphs.callables[0], module)
    assert torch.equal(actual, gradient_of(module, module))
    graphs.release()


class Logits(nn.Module):
    """Its logits take 128 MiB, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(256, 2**16, device="cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).logsumexp(-1)


def test_a_capture_of_evaluations_runs_in_the_memory_of_the_slots() -> None:
    module = Logits()
    graphs = ChunkGraphs([module], [1], options=CaptureOptions(can_sleep=True))
    x = torch.randn(512, 256, device="cuda")

    def evaluate() -> torch.Tensor:
        with torch.no_grad(), graphs.step(1, forward_only=True):
            return graphs.callables[0](x)

    expected = evaluate()  # eager
    graphs.capture([(x.clone().requires_grad_(),)])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    assert torch.equal(evaluate(), expected)
    assert graphs.forward_only.counters.replayed_steps == 1
    assert torch.cuda.max_memory_reserved() - before <= 48 << 20  # of 128 MiB and more in eager

"""The accumulation kernel equals ``add_`` to the last bit."""

from __future__ import annotations

import pytest
import torch

from chunkgraph.engine.capture.accumulate import new_accumulate


def _all_halves(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Return every value of a half-precision type, with infinities, NaNs and subnormals."""
    return torch.arange(1 << 16, device=device).to(torch.uint16).view(dtype)


def _sums(dtype: torch.dtype, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator(device).manual_seed(3)

    def sink(*shape: int) -> torch.Tensor:
        bits = torch.randint(-(2**31), 2**31, shape, generator=generator, device=device)
        return bits.to(torch.int32).view(torch.float32)

    halves = _all_halves(dtype, device)
    shuffled = halves[torch.randperm(1 << 16, generator=generator, device=device)]
    return [
        (sink(1 << 16), halves),
        (sink(257, 255), shuffled[: 257 * 255].view(257, 255)),
        (sink(3), shuffled[:3]),
        (sink(256, 256).t(), shuffled.view(256, 256)),
        (sink(64, 1024)[1:], shuffled.view(64, 1024)[:-1]),
        (sink(1 << 16)[1:], shuffled[1:]),
        (torch.full((9,), -0.0, device=device), torch.zeros(9, dtype=dtype, device=device)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_sum_is_that_of_add(device: str, dtype: torch.dtype) -> None:
    for sink, gradient in _sums(dtype, device):
        expected = sink.clone()
        expected.add_(gradient)
        new_accumulate([sink], [dtype])(sink, gradient)
        is_number = ~expected.isnan()
        assert torch.equal(sink.isnan(), expected.isnan())
        assert torch.equal(
            sink[is_number].view(torch.int32), expected[is_number].view(torch.int32)
        ), tuple(sink.shape)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_is_used_and_compiles_nothing_later() -> None:
    sink = torch.zeros(300, 100, device="cuda")
    gradient = torch.ones(300, 100, device="cuda", dtype=torch.bfloat16)
    accumulate = new_accumulate([sink], [torch.bfloat16])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        accumulate(sink, gradient)
        torch.cuda.synchronize()
    assert any("_add_mixed" in event.name for event in profiler.events())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        accumulate(sink, gradient)
    graph.replay()
    assert torch.equal(sink, torch.full_like(sink, 2.0))

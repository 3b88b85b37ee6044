"""The accumulation kernel equals ``add_`` to the last bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from chunkgraph.engine.capture.accumulate import Accumulation, add_together, new_accumulate


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
        new_accumulate([sink], [dtype])([sink], [gradient])
        is_number = ~expected.isnan()
        assert torch.equal(sink.isnan(), expected.isnan())
        assert torch.equal(
            sink[is_number].view(torch.int32), expected[is_number].view(torch.int32)
        ), tuple(sink.shape)


def _sinks_of_experts(layout: str, device: str) -> list[torch.Tensor]:
    """Return twelve float32 sinks [24, 16] in one buffer."""
    generator = torch.Generator(device).manual_seed(4)
    buffer = torch.randn(16 * 24 * 16 + 32, generator=generator, device=device)
    places = {
        "in order": range(12),
        "reversed, as in a buffer of Megatron's": range(11, -1, -1),
        "with a gap": [*range(5), *range(7, 14)],
        "shuffled": [3, 9, 0, 1, 2, 11, 10, 4, 5, 6, 7, 8],
    }
    begin, numbers = (4, range(12)) if layout == "unaligned" else (0, places[layout])
    return [buffer[begin + n * 384 :][:384].view(24, 16) for n in numbers]


@pytest.mark.parametrize(
    "layout",
    ["in order", "reversed, as in a buffer of Megatron's", "with a gap", "shuffled", "unaligned"],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_of_a_tensor_are_added_like_single_gradients(device: str, layout: str) -> None:
    sinks = _sinks_of_experts(layout, device)
    gradients = torch.randn(12, 24, 16, device=device).bfloat16()
    add_together(gradients)
    expected = [sink + gradient for sink, gradient in zip(sinks, gradients, strict=True)]
    seen: list[int] = []

    class Marker:
        def accumulated(self, index: int) -> None:
            assert torch.equal(sinks[index], expected[index])
            seen.append(index)

        def replayed(self) -> None:
            raise AssertionError

    accumulate = new_accumulate(sinks, [torch.bfloat16] * 12)
    sums = Accumulation(accumulate, sinks, Marker())
    for index in (5, 4, 3, 2, 1, 0, 11, 10, 9, 8, 7):
        sums.add(index, gradients[index])
    assert not seen
    sums.add(6, gradients[6])
    assert sorted(seen) == list(range(12))
    assert sums.trained == set(range(12))


def test_parts_wait_for_no_other_tensor() -> None:
    sinks = [torch.zeros(2) for _ in range(4)]
    calls: list[list[float]] = []

    def accumulate(sinks: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        calls.append([float(gradient[0]) for gradient in gradients])

    sums = Accumulation(accumulate, sinks)
    parts = torch.tensor([[0.0, 0], [1, 0], [2, 0]])
    add_together(parts)
    sums.add(0, parts[0])
    sums.add(1, parts[1])
    sums.add(3, torch.tensor([3.0, 0]))  # of another tensor: the parts do not wait for the third
    assert calls == [[0.0, 1.0], [3.0]]
    sums.add(2, parts[2])
    sums.add(2, parts[1])  # the same parameter again: its sums keep their order
    assert calls[2:] == [[2.0]]
    sums.finish()
    assert calls[3:] == [[1.0]]
    larger = torch.zeros(1).expand(2)  # than its memory
    add_together(larger)
    sums.add(0, larger)
    assert calls[4:] == [[0.0]]
    sums.finish()
    assert len(calls) == 5


@pytest.mark.gpu
def test_on_a_gpu_parts_are_added_on_the_stream_that_computed_them() -> None:
    sinks = [torch.zeros(4, 64, device="cuda") for _ in range(3)]
    accumulate = new_accumulate(sinks, [torch.bfloat16] * 3)
    parts = torch.zeros(3, 4, 64, device="cuda", dtype=torch.bfloat16)
    add_together(parts)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    sums = Accumulation(accumulate, sinks)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: the parts are not there yet
        parts.fill_(1)
        sums.add(0, parts[0])
        sums.add(1, parts[1])
    sums.add(2, torch.ones(4, 64, device="cuda", dtype=torch.bfloat16))
    torch.cuda.synchronize()
    assert all(torch.equal(sink, torch.ones_like(sink)) for sink in sinks)


@pytest.mark.gpu
def test_on_a_gpu_one_kernel_adds_all_parts_of_a_tensor() -> None:
    sinks = list(torch.zeros(32, 64, 64, device="cuda").unbind())[::-1]
    accumulate = new_accumulate(sinks, [torch.bfloat16] * 32)
    gradients = torch.ones(32, 64, 64, device="cuda", dtype=torch.bfloat16).unbind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        accumulate(sinks, gradients)
        torch.cuda.synchronize()
    assert sum("_add_mixed" in event.name for event in profiler.events()) == 1
    assert all(torch.equal(sink, torch.ones_like(sink)) for sink in sinks)


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_is_used_and_compiles_nothing_later() -> None:
    sinks = torch.zeros(2, 320, 100, device="cuda").unbind()
    gradients = torch.ones(2, 320, 100, device="cuda", dtype=torch.bfloat16).unbind()
    accumulate = new_accumulate(sinks, [torch.bfloat16] * 2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        accumulate(sinks[:1], gradients[:1])
        torch.cuda.synchronize()
    assert any("_add_mixed" in event.name for event in profiler.events())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        accumulate(sinks, gradients)
    graph.replay()
    assert torch.equal(sinks[0], torch.full_like(sinks[0], 2.0))
    assert torch.equal(sinks[1], torch.full_like(sinks[1], 1.0))

"""One pool for everything gives wrong numbers; the proof refuses it before any replay."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.capture import session
from chunkgraph.engine.capture.warm_up import warm_up
from chunkgraph.errors import MemoryPlanError, SlotError
from chunkgraph.graphs import GraphBackend
from chunkgraph.schedules import megatron_schedule
from chunkgraph.slots import plan_all_ranks

COUNTS = [3, 5, 2, 7]


def attached(make_pipeline: Callable[..., Any], backend: GraphBackend, **options: Any) -> Any:
    pipeline = make_pipeline(2)
    pipeline.attach([(2,), (1,)], backend, **options)
    return pipeline


def schedules() -> list[Any]:
    return [megatron_schedule(2, 1, m, None) for m in COUNTS]


@pytest.mark.parametrize("plan", ["shared_temporaries", "shared_backward"])
def test_a_rank_with_one_slot_has_one_pool(
    make_pipeline: Callable[..., Any], backend: GraphBackend, plan: str
) -> None:
    """Its backward reuses what its forward frees, as in eager training."""
    pipeline = attached(make_pipeline, backend, memory_plan=plan)
    trained = pipeline.train(schedules(), seed=1)
    assert trained.equals(make_pipeline(2).train(schedules(), seed=1))
    several, one = (graphs.report for graphs in pipeline.graphs)
    assert several.scratch_bytes > 0
    assert one.scratch_bytes == 0 < one.slot_bytes


def test_a_naive_shared_pool_is_caught_by_the_proof(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    pipeline = attached(make_pipeline, backend, memory_plan="one_pool")
    with pytest.raises(
        MemoryPlanError,
        match=r"(?s)replaying chunk 0 slot \d (for|back)ward overwrites.*still reads",
    ):
        pipeline.train(schedules(), seed=1)


def test_a_naive_shared_pool_gives_wrong_numbers(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    pipeline = attached(make_pipeline, backend, memory_plan="one_pool")
    for graphs in pipeline.graphs:
        unproved = dataclasses.replace(graphs._capturer.settings, prove=False)
        graphs._capturer = dataclasses.replace(graphs._capturer, settings=unproved)
    eager = make_pipeline(2).train(schedules(), seed=1)
    assert not pipeline.train(schedules(), seed=1).equals(eager)


@pytest.mark.parametrize("plan", ["shared_temporaries", "shared_backward", "pool_per_slot"])
def test_the_other_plans_are_proved_and_right(
    make_pipeline: Callable[..., Any], backend: GraphBackend, plan: str
) -> None:
    pipeline = attached(make_pipeline, backend, memory_plan=plan)
    assert pipeline.train(schedules(), seed=1).equals(make_pipeline(2).train(schedules(), seed=1))


def test_all_backwards_share_one_scratch_pool(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    reports = {}
    for plan in ("shared_backward", "pool_per_slot"):
        pipeline = make_pipeline(1)
        pipeline.attach([(4,)], backend, memory_plan=plan)
        pipeline.train([megatron_schedule(1, 1, m, None) for m in (1, 1)], seed=1)
        reports[plan] = pipeline.graphs[0].report
    assert reports["shared_backward"].scratch_bytes > 0
    assert reports["pool_per_slot"].scratch_bytes == 0
    assert reports["shared_backward"].num_graphs == reports["pool_per_slot"].num_graphs == 8


def _width(device: torch.device) -> int:
    """CUDA's allocator reserves pieces of 20 MiB, so tensors must be as large."""
    return 1 << (17 if device.type == "cuda" else 13)


class ManyTemporaries(torch.nn.Module):
    """Autograd saves neither the parts nor their stack."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((_width(device),), 1.25, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x + float(i) for i in range(6)]
        return torch.stack(parts).sum(0).neg() * self.weight


def test_temporaries_of_forwards_share_scratch_too(backend: GraphBackend) -> None:
    """Of 12 simultaneous temporaries a slot's pool holds all or none."""
    width = _width(backend.device)
    samples = [(torch.randn(32, width, device=backend.device, requires_grad=True),)]
    reports, grads = {}, {}
    plans: list[Any] = ["shared_temporaries", "shared_backward"]
    for plan in plans:
        module = ManyTemporaries(backend.device)
        options = CaptureOptions(memory_plan=plan, verify="poison")
        graphs = ChunkGraphs([module], [3], backend=backend, options=options)
        reports[plan] = graphs.capture(samples)
        x = torch.linspace(-1, 1, 32 * width, device=backend.device).view(32, -1).requires_grad_()
        with graphs.step(2):
            outputs = [graphs.callables[0](x), graphs.callables[0](x * 2)]
            for y in reversed(outputs):
                y.square().sum().backward()
        assert x.grad is not None
        grads[plan] = x.grad
        del graphs, outputs
    small, large = reports["shared_temporaries"], reports["shared_backward"]
    kept_bytes = 2 * samples[0][0].nbytes  # the product's other factor, and the output
    assert small.slot_bytes <= 3 * kept_bytes * 1.5 < large.slot_bytes
    assert small.scratch_bytes > 0
    assert torch.equal(grads["shared_temporaries"], grads["shared_backward"])


def test_what_a_forward_keeps_only_when_captured_is_not_left_in_scratch(
    backend: GraphBackend,
) -> None:
    class Caching(ManyTemporaries):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1.0
            self.num_calls = getattr(self, "num_calls", 0) + 1
            if self.num_calls > 1:
                self.kept = y
            return y.neg() * self.weight

    options = CaptureOptions(memory_plan="shared_temporaries")
    graphs = ChunkGraphs([Caching(backend.device)], [2], backend=backend, options=options)
    sample = torch.randn(2, _width(backend.device), device=backend.device, requires_grad=True)
    with pytest.raises(MemoryPlanError, match=r"slot 0.*keeps \d+ bytes.*shared_backward"):
        graphs.capture([(sample,)])


def test_an_unexpected_operator_ends_the_routing_not_the_capture(backend: GraphBackend) -> None:
    """The slot keeps tensors that the eager pass did not show."""

    class Changing(ManyTemporaries):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone() + 1.0 if has_run[0] else x + 1.0
            has_run[0] = 1
            return y.neg() * self.weight

    has_run = array("b", [0])  # a capture session does not see this
    module = Changing(backend.device)
    options = CaptureOptions(memory_plan="shared_temporaries", verify="poison")
    graphs = ChunkGraphs([module], [1], backend=backend, options=options)
    x = torch.randn(2, _width(backend.device), device=backend.device, requires_grad=True)
    graphs.capture([(x,)])
    with graphs.step(1):
        y = graphs.callables[0](x)
        assert torch.equal(y, (x + 1.0).neg() * module.weight)
        y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, -module.weight.detach().expand_as(x))


def test_poison_shows_an_output_that_is_lent_for_too_short_a_time(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    """Freed slots hold NaN, which a late reader of a finished microbatch's output sees."""
    (module,) = make_pipeline(1).stages
    chunk = dataclasses.replace(
        Chunk.from_module(module, "it"), copies_outputs=lambda *_, **__: False
    )
    # A single slot also holds its input gradients.
    graphs = ChunkGraphs([chunk], [2], backend=backend, options=CaptureOptions(verify="poison"))
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    graphs.capture([x])
    with graphs.step(1):
        y = graphs.callables[0](x)
        assert y.isfinite().all()
        y.sum().backward()
        assert y.isnan().all()
        assert x.grad is not None
        assert x.grad.isfinite().all()


class WritesOverItsSavedTensor(torch.autograd.Function):
    """Writes the gradient into a saved tensor, as compiled backwards with donated buffers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        saved = x * 3
        ctx.save_for_backward(saved)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grad)


@pytest.mark.parametrize("verify", ["none", "poison", "shadow"])
@pytest.mark.parametrize("plan", ["shared_temporaries", "shared_backward", "pool_per_slot"])
def test_gradients_written_over_saved_tensors(
    backend: GraphBackend, plan: Any, verify: Any
) -> None:
    class Donating(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.full((8,), 1.5, device=backend.device))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return WritesOverItsSavedTensor.apply(x) * self.scale

    module = Donating()
    options = CaptureOptions(memory_plan=plan, verify=verify)
    graphs = ChunkGraphs([module], [2], backend=backend, options=options)
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    graphs.capture([(x,)])
    inputs = [torch.randn(3, 8, device=backend.device, requires_grad=True) for _ in range(4)]
    with graphs.step(4):
        for first, second in (inputs[:2], inputs[2:]):
            outputs = [graphs.callables[0](first), graphs.callables[0](second)]
            for y in outputs:
                y.square().sum().backward()
    replayed, module.scale.grad = module.scale.grad.clone(), None
    for tensor in inputs:
        leaf = tensor.detach().requires_grad_()
        module(leaf).square().sum().backward()
        assert torch.equal(tensor.grad, leaf.grad)
    assert torch.equal(replayed, module.scale.grad)


def test_shared_slots_hold_no_more_than_is_ever_in_flight(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    """Two chunks on each of two ranks: rank 0 has 4 + 2 slots, but 5 microbatches at most."""
    if backend.name != "recorder":
        pytest.skip("sizes to the byte are the recorder's: a GPU's allocator rounds up to 2 MiB")
    plans = plan_all_ranks(2, 2, 2)
    assert [p.slots_per_chunk for p in plans] == [(4, 2), (3, 1)]
    assert [p.peak_in_flight for p in plans] == [5, 3]
    reports: dict[bool, list[Any]] = {}
    schedules = [megatron_schedule(2, 2, m, 2) for m in (4, 6)]
    for shared in (False, True):
        pipeline = make_pipeline(2, 2)
        slots = [(p.peak_in_flight,) * 2 if shared else p.slots_per_chunk for p in plans]
        pipeline.attach(slots, backend, shared_slots=shared)
        pipeline.train(schedules, seed=3)
        reports[shared] = [graphs.report for graphs in pipeline.graphs]
    for own, together, plan in zip(reports[False], reports[True], plans, strict=True):
        assert len(set(together.num_slots)) == 1
        # Chunks of one size: memory shrinks with the number of slots.
        ratio = plan.peak_in_flight / sum(plan.slots_per_chunk)
        assert together.held_bytes == pytest.approx(own.held_bytes * ratio, rel=0.05)
        assert together.slot_bytes < own.slot_bytes


def test_shared_slots_of_different_numbers_are_refused() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(SlotError, match="pass equal ones"):
        ChunkGraphs(chunks, [2, 1], options=CaptureOptions(shared_slots=True))


@pytest.mark.parametrize(
    ("held_bytes", "num_slots"),
    [((10, 10), (5, 5)), ((10, 2), (4, 2)), ((10, 5), (4, 2)), ((9, 6), (5, 5)), ((0, 0), (4, 2))],
)
def test_chunks_share_slots_where_the_sizes_say_that_it_saves(
    held_bytes: tuple[int, int],
    num_slots: tuple[int, int],
    make_pipeline: Callable[..., Any],
    backend: GraphBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 + 2 slots of their sizes, or 5 of the larger one."""
    if backend.name != "recorder":
        pytest.skip("the sizes are replaced")
    sizes = {f"chunk {c}": size for c, size in enumerate(held_bytes)}

    def measured(chunk: Chunk, *args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(warm_up(chunk, *args, **kwargs), held_bytes=sizes[chunk.label])

    monkeypatch.setattr(session, "warm_up", measured)
    plans = plan_all_ranks(2, 2, 2)
    schedules = [megatron_schedule(2, 2, m, 2) for m in (4, 6)]
    pipeline = make_pipeline(2, 2)
    together = [p.peak_in_flight for p in plans]
    pipeline.attach([p.slots_per_chunk for p in plans], backend, together, verify="poison")
    trained = pipeline.train(schedules, seed=3)
    assert trained.equals(make_pipeline(2, 2).train(schedules, seed=3))
    report = pipeline.graphs[0].report
    assert report.num_slots == num_slots
    assert report.shared_slots == (num_slots == (5, 5))


@pytest.mark.parametrize("backward", ["whole", "split"])
def test_outputs_and_input_gradients_keep_no_block(backward: str, backend: GraphBackend) -> None:
    """Chunks that share slots, and backwards that share scratch, use the same memory for them."""
    chunks = [
        Chunk.from_module(nn.Linear(8, 8, device=backend.device), f"chunk {c}", backward=backward)
        for c in range(2)
    ]
    options = CaptureOptions(shared_slots=True)
    graphs = ChunkGraphs(chunks, [2, 2], backend=backend, options=options)
    graphs.capture([(torch.ones(3, 8, device=backend.device, requires_grad=True),)] * 2)
    assert graphs._captured is not None
    pools = graphs._captured.pools.pools
    assert len(pools) == 3
    assert not any(pool.live() for pool in pools)

"""One pool for everything gives wrong numbers; the proof refuses it before any replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply, capture

from chunkgraph.engine import Chunk
from chunkgraph.engine.capture import session
from chunkgraph.engine.capture.warm_up import warm_up
from chunkgraph.engine.program import Isolated
from chunkgraph.errors import MemoryPlanError
from chunkgraph.graphs import GraphBackend
from chunkgraph.memory import PoolPlan
from chunkgraph.schedules import megatron_schedule
from chunkgraph.slots import plan_slots

COUNTS = [3, 5, 2, 7]


def attached(make_pipeline: Callable[..., Any], backend: GraphBackend, **options: Any) -> Any:
    pipeline = make_pipeline(2)
    pipeline.attach([(2,), (1,)], backend, **options)
    return pipeline


def schedules() -> list[Any]:
    return [megatron_schedule(2, 1, m, None) for m in COUNTS]


def test_a_rank_with_one_slot_has_one_pool(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    """Its backward reuses what its forward frees, as in eager training."""
    pipeline = attached(make_pipeline, backend)
    trained = pipeline.train(schedules(), seed=1)
    assert trained.equals(make_pipeline(2).train(schedules(), seed=1))
    several, one = (graphs.report for graphs in pipeline.graphs)
    assert several.scratch_bytes > 0
    assert one.scratch_bytes == 0 < one.slot_bytes


def test_one_pool_for_all_is_refused_by_the_proof_and_gives_wrong_numbers(
    make_pipeline: Callable[..., Any], backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_pool = PoolPlan.forward_pool
    monkeypatch.setattr(PoolPlan, "forward_pool", lambda p, *a: p.scratch or own_pool(p, *a))
    pipeline = attached(make_pipeline, backend)
    with pytest.raises(
        MemoryPlanError,
        match=r"(?s)replaying chunk 0 slot \d (for|back)ward overwrites.*still reads",
    ):
        pipeline.train(schedules(), seed=1)
    monkeypatch.setattr(session, "prove_disjoint", lambda _: None)
    pipeline = attached(make_pipeline, backend)
    eager = make_pipeline(2).train(schedules(), seed=1)
    assert not pipeline.train(schedules(), seed=1).equals(eager)


def test_poison_shows_an_output_that_is_lent_for_too_short_a_time(
    make_pipeline: Callable[..., Any], backend: GraphBackend
) -> None:
    """Freed slots hold NaN, which a late reader of a finished microbatch's output sees."""
    (module,) = make_pipeline(1).stages
    chunk = dataclasses.replace(
        Chunk.from_module(module, "it"), copies_outputs=lambda *_, **__: False
    )
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    # A single slot also holds its input gradients.
    graphs = capture(chunk, x, backend=backend, num_slots=2, verify="poison")
    with graphs.step(1):
        y = graphs.callables[0](x)
        assert y.isfinite().all()
        y.sum().backward()
        assert y.isnan().all()
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
@pytest.mark.parametrize("num_slots", [1, 2])
def test_gradients_written_over_saved_tensors(
    backend: GraphBackend, num_slots: int, verify: Any
) -> None:
    scale = nn.Parameter(torch.full((8,), 1.5))
    module = Apply(lambda m, x: WritesOverItsSavedTensor.apply(x) * m.scale, scale=scale)
    x = torch.randn(3, 8, device=backend.device, requires_grad=True)
    graphs = capture(module, x, backend=backend, num_slots=num_slots, verify=verify)
    inputs = [torch.randn(3, 8, device=backend.device, requires_grad=True) for _ in range(4)]
    with graphs.step(4):
        for first in range(0, 4, num_slots):
            outputs = [graphs.callables[0](x) for x in inputs[first : first + num_slots]]
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
    plans = [plan_slots(2, 2, 2, rank=rank) for rank in range(2)]
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

    def measured(own: Isolated, *args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(warm_up(own, *args, **kwargs), held_bytes=sizes[own.chunk.label])

    monkeypatch.setattr(session, "warm_up", measured)
    plans = [plan_slots(2, 2, 2, rank=rank) for rank in range(2)]
    schedules = [megatron_schedule(2, 2, m, 2) for m in (4, 6)]
    pipeline = make_pipeline(2, 2)
    together = [p.peak_in_flight for p in plans]
    pipeline.attach([p.slots_per_chunk for p in plans], backend, together, verify="poison")
    trained = pipeline.train(schedules, seed=3)
    assert trained.equals(make_pipeline(2, 2).train(schedules, seed=3))
    report = pipeline.graphs[0].report
    assert report.num_slots == num_slots
    assert report.shared_slots == (num_slots == (5, 5))

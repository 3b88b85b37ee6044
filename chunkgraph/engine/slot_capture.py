"""One slot captured: its forward, later its backward, and where both read and write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.chunk import Chunk, GradientMarker
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.leaves import check_outputs
from chunkgraph.engine.signature import Call, flatten
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.static_inputs import SlotStatics, call_with
from chunkgraph.errors import CaptureError, MemoryPlanError
from chunkgraph.graphs import AddressRanges, Graph, GraphBackend, OperatorTrace, Pool
from chunkgraph.memory import PoolPlan, SlotFootprint

__all__ = ["CapturedForward", "capture_backward", "capture_forward", "footprint", "new_slot"]

Generators = Callable[[], Sequence[torch.Generator]]


@dataclass
class CapturedForward:
    """A captured forward whose autograd graph is still alive."""

    chunk_index: int
    index: int
    bank: Hashable
    label: str
    inputs: list[torch.Tensor]
    leaves: list[Any]
    spec: Any
    graph: Graph
    pool: Pool
    live: AddressRanges
    statics: SlotStatics
    copies_outputs: bool = False
    grads: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    backward: Graph | None = None
    marker: GradientMarker | None = None

    def slot(self, are_shared: bool) -> Hashable:
        """The same for all variants of one slot."""
        return self.index if are_shared else (self.chunk_index, self.index)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the result."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which of them take a gradient."""
        return tuple(i for i, t in enumerate(self.tensors) if t.requires_grad)


def capture_forward(
    place: tuple[int, int, Hashable],
    label: str,
    pool: Pool,
    chunk: Chunk,
    sample: Call,
    leaves: Sequence[nn.Parameter],
    trace: OperatorTrace | None,
    backend: GraphBackend,
    pools: PoolPlan,
    statics: SlotStatics,
    generators: Generators,
) -> CapturedForward:
    """Capture the forward of one slot in one bank.

    Args:
        place: index of the chunk, number of the slot, key of the bank.
        label: names it in errors.
        pool: of the slot.
        chunk: whose forward.
        sample: its arguments.
        leaves: what stands in the place of its parameters.
        trace: of its operators, where the memory plan needs it.
        backend: makes the graph.
        pools: of the session.
        statics: memory for what the slot reads.
        generators: see `ChunkGraphs`.

    Raises:
        CaptureError: it cannot be captured; no graph is left.
        MemoryPlanError: it keeps memory of scratch.
    """
    inputs = [statics.input_like(i, t) for i, t in enumerate(sample.tensors)]
    router = pools.router(trace)
    before = pool.live()
    in_scratch = router.scratch.live() if router is not None else AddressRanges()
    with (
        torch.enable_grad(),
        backend.capture(f"{label} forward", pool, generators(), router) as graph,
    ):
        result = call_with(chunk, sample, inputs)
    if router is not None and (live := _minus(router.scratch.live(), in_scratch)):
        graph.release()
        raise MemoryPlanError(
            f"{label}: its forward keeps {live.num_bytes} bytes that its eager pass dropped, so "
            "they were taken from scratch, where the next replay would overwrite them. A forward "
            "that caches something in some calls does this. Use memory_plan 'shared_backward'."
        )
    results, spec = flatten(result)
    live = _minus(pool.live(), before)
    forward = CapturedForward(*place, label, inputs, results, spec, graph, pool, live, statics)
    if chunk.copies_outputs is not None:
        args, kwargs = sample.arguments()
        forward.copies_outputs = chunk.copies_outputs(*args, **kwargs)
    outputs = [forward.tensors[i] for i in forward.differentiable]
    try:
        check_outputs(chunk.label, outputs, [*inputs, *leaves])
    except CaptureError:
        graph.release()
        raise
    return forward


def capture_backward(
    forward: CapturedForward,
    chunk: Chunk,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    pools: PoolPlan,
    generators: Generators,
) -> None:
    """Capture the backward of a forward, which frees what that one keeps."""
    outputs = [forward.tensors[i] for i in forward.differentiable]
    forward.grads = [forward.statics.gradient_like(i, t) for i, t in enumerate(outputs)]
    label = f"{forward.label} backward"
    pool = pools.backward_pool(forward.pool)
    accumulating = sinks.accumulating(leaves, forward.marker)
    with accumulating, backend.capture(label, pool, generators()) as graph:
        # Not autograd.grad, which forbids the backwards inside a backward of recomputation.
        torch.autograd.backward(outputs, forward.grads)
        if chunk.end_of_backward is not None:
            chunk.end_of_backward()
    forward.backward = graph
    for tensor in forward.inputs:
        forward.input_grads.append(tensor.grad)
        tensor.grad = None


def new_slot(forward: CapturedForward, chunk: Chunk, backend: GraphBackend) -> Slot:
    """The slot, once both of its graphs are there."""
    assert forward.backward is not None
    return Slot(
        chunk=forward.chunk_index,
        index=forward.index,
        label=forward.label,
        inputs=tuple(t.detach() for t in forward.inputs),
        outputs=tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in forward.leaves),
        output_spec=forward.spec,
        differentiable=forward.differentiable,
        output_grads=tuple(forward.grads),
        input_grads=tuple(forward.input_grads),
        forward_graph=forward.graph,
        backward_graph=forward.backward,
        pool=forward.pool,
        grads_lie_in_pool=any(
            g is not None and bool(backend.raw(g) & forward.pool.reserved())
            for g in forward.input_grads
        ),
        marker=forward.marker,
        keeps_input_grads=chunk.keeps_input_grads,
        copies_outputs=forward.copies_outputs,
        bank=forward.bank,
    )


def footprint(forward: CapturedForward, backend: GraphBackend, are_shared: bool) -> SlotFootprint:
    """Where it reads and writes, for the proof."""
    assert forward.backward is not None
    loaded = AddressRanges()
    for tensor in (*forward.inputs, *forward.grads):
        loaded = loaded | backend.raw(tensor)
    graphs = (forward.graph, forward.backward)
    slot = forward.slot(are_shared)
    writes = {g.label: g.writes() for g in graphs}
    # What is copied in before a replay is written as much as what the graph writes.
    writes[f"{forward.label} (its inputs loaded)"] = loaded
    return SlotFootprint(forward.label, forward.live | loaded, writes, slot)


def _minus(after: AddressRanges, before: AddressRanges) -> AddressRanges:
    """Addresses in ``after`` that are not in ``before``."""
    left: list[tuple[int, int]] = []
    for r in after:
        start = r.start
        for b in AddressRanges([r]) & before:
            left.append((start, b.start))
            start = b.end
        left.append((start, r.end))
    return AddressRanges(left)

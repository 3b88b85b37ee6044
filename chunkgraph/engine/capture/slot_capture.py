"""One slot captured: its forward, later its backward, and where both read and write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.autograd_graph import edges_to_leaves, kept_by, nodes_below
from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.outputs import check_outputs
from chunkgraph.engine.capture.static_inputs import SlotStatics, call_with
from chunkgraph.engine.chunk import Chunk, GradientMarker
from chunkgraph.engine.layout import dense_strides
from chunkgraph.engine.signature import Call, argument_paths, distinct_tensors, flatten
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import CaptureError, MemoryPlanError
from chunkgraph.graphs import AddressRanges, Graph, GraphBackend, OperatorTrace, Pool
from chunkgraph.memory import PoolPlan, SlotFootprint

__all__ = ["CapturedForward", "capture_backward", "capture_forward", "footprint", "new_slot"]

Generators = Callable[[], Sequence[torch.Generator]]


@dataclass
class CapturedForward:
    """A captured forward whose autograd graph is still alive.

    Attributes that `Slot` does not have:
        strides: of the gradients of ``receiving``.
        results_grads: see `call_with`.
        num_terms: how many gradients autograd adds up for each parameter of the chunk; 0 where
            recomputation hides that.
    """

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
    copies_outputs: bool = True
    receiving: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...] | None, ...] = ()
    has_grad_layouts: bool = False
    guarded: tuple[int, ...] = ()
    nested: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    num_terms: dict[int, int] = field(default_factory=dict)
    backward_autocast: Autocast | None = None
    results_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    backward: Graph | None = None
    marker: GradientMarker | None = None

    def slot(self, are_shared: bool) -> Hashable:
        """The same for all variants of one slot."""
        return self.index if are_shared else (self.chunk_index, self.index)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the result, each once."""
        return distinct_tensors(self.leaves)

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
    versions = [t._version for t in inputs]
    results_grads: dict[int, torch.Tensor] = {}
    router = pools.router(trace)
    before = pool.live()
    in_scratch = router.scratch.live() if router is not None else AddressRanges()
    with (
        torch.enable_grad(),
        backend.capture(f"{label} forward", pool, generators(), router) as graph,
    ):
        result = call_with(chunk, sample, inputs, results_grads)
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
    forward.results_grads = results_grads
    try:
        _refuse_written(chunk.label, sample, inputs, versions)
        _describe_outputs(forward, chunk, sample, leaves)
    except CaptureError:
        graph.release()
        raise
    return forward


def _describe_outputs(
    forward: CapturedForward, chunk: Chunk, sample: Call, leaves: Sequence[nn.Parameter]
) -> None:
    """Work out how the outputs are handed out, and which of them get a gradient.

    Raises:
        CaptureError: none requires grad, or gradients of other tensors would be lost.
    """
    if chunk.copies_outputs is not None:
        args, kwargs = sample.arguments()
        forward.copies_outputs = chunk.copies_outputs(*args, **kwargs)
    positions = forward.differentiable
    strides: Sequence[tuple[int, ...] | None] = [
        dense_strides(forward.tensors[i]) for i in positions
    ]
    if sample.backward is not None and sample.backward.strides is not None:
        forward.backward_autocast = sample.backward.autocast
        forward.has_grad_layouts = True
        strides = sample.backward.strides
    received = [(i, s) for i, s in zip(positions, strides, strict=True) if s is not None]
    forward.receiving = tuple(i for i, _ in received)
    forward.strides = tuple(s for _, s in received)
    outputs = [forward.tensors[i] for i in forward.receiving]
    check_outputs(chunk, outputs, [*forward.inputs, *leaves])
    forward.nested = tuple(
        i
        for i in forward.receiving
        if forward.tensors[i].grad_fn
        in set(nodes_below(t for t in outputs if t is not forward.tensors[i]))
    )
    edges = edges_to_leaves(outputs)
    forward.num_terms = {i: edges.get(leaf, 0) for i, leaf in enumerate(leaves)}
    module_tensors = (
        [*chunk.module.parameters(), *chunk.module.buffers()] if chunk.module is not None else []
    )
    if forward.copies_outputs:
        others = [*forward.inputs, *leaves, *module_tensors]
        forward.guarded = _guarded_outputs(forward.tensors, others)


def _guarded_outputs(
    outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Return which outputs a caller must not change in place; see `Slot`.

    Args:
        outputs: of the forward.
        others: arguments, parameters and buffers.
    """
    kept = [tensor for node in nodes_below(outputs) for _, tensor in kept_by(node)]
    storages = {_storage(tensor) for tensor in (*kept, *others)}
    of_outputs = [_storage(tensor) for tensor in outputs]
    return tuple(
        i
        for i, storage in enumerate(of_outputs)
        if storage and (storage in storages or of_outputs.count(storage) > 1)
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _refuse_written(
    label: str, sample: Call, inputs: Sequence[torch.Tensor], versions: Sequence[int]
) -> None:
    """Refuse a chunk that writes into its arguments: a replay writes into copies of them.

    Raises:
        CaptureError: naming them.
    """
    written = [
        path
        for path, tensor, version in zip(argument_paths(sample), inputs, versions, strict=True)
        if tensor._version != version
    ]
    if written:
        raise CaptureError(
            f"{label}: its forward changes {', '.join(written)} in place. A replay works on a "
            "copy, so that the caller's tensor would stay as it was. Compute a new tensor and "
            "return it, or keep the state in a buffer of the module."
        )


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
    outputs = [forward.tensors[i] for i in forward.receiving]
    forward.grads = [
        forward.statics.gradient_like(i, output, strides)
        for i, (output, strides) in enumerate(zip(outputs, forward.strides, strict=True))
    ]
    label = f"{forward.label} backward"
    pool = pools.backward_pool(forward.pool)
    autocast = forward.backward_autocast
    with (
        sinks.accumulating(leaves, forward.marker) as trained,
        autocast.entered() if autocast is not None else nullcontext(),
        backend.capture(label, pool, generators()) as graph,
    ):
        # Not autograd.grad, which forbids the backwards inside a backward of recomputation.
        torch.autograd.backward(outputs, forward.grads)
        if chunk.end_of_backward is not None:
            chunk.end_of_backward()
    forward.backward = graph
    forward.trained = sinks.interned(tuple(sorted(trained)))
    for tensor in forward.inputs:
        forward.input_grads.append(forward.results_grads.pop(id(tensor), tensor.grad))
        tensor.grad = None


def new_slot(forward: CapturedForward, chunk: Chunk, backend: GraphBackend) -> Slot:
    """The slot, once both of its graphs are there."""
    assert forward.backward is not None
    outputs = {id(tensor): tensor.detach() for tensor in forward.tensors}
    return Slot(
        chunk=forward.chunk_index,
        index=forward.index,
        label=forward.label,
        inputs=tuple(t.detach() for t in forward.inputs),
        outputs=tuple(outputs.get(id(leaf), leaf) for leaf in forward.leaves),
        output_spec=forward.spec,
        differentiable=forward.differentiable,
        receiving=forward.receiving,
        has_grad_layouts=forward.has_grad_layouts,
        trained=forward.trained,
        guarded=forward.guarded,
        nested=forward.nested,
        backward_autocast=forward.backward_autocast,
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

"""Capture one slot: its forward, later its backward, and the memory that both read and write."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.autograd_graph import leaves_below
from chunkgraph.engine.capture.gradients import GradientSinks
from chunkgraph.engine.capture.output_gradients import OutputGradients
from chunkgraph.engine.capture.static_inputs import SlotStatics, call_with
from chunkgraph.engine.chunk import Chunk, GradientMarker
from chunkgraph.engine.host import Host
from chunkgraph.engine.layout import memory_of
from chunkgraph.engine.module_tree import entries
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import Call, argument_paths, distinct_tensors, flatten
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, Graph, GraphBackend, Pool, storage_address
from chunkgraph.memory import PoolPlan, SlotFootprint

__all__ = [
    "CapturedForward",
    "GraphMaker",
    "SlotPlace",
    "capture_backward",
    "capture_forward",
    "footprint",
    "make_output_grads",
    "new_slot",
    "refuse_undeclared",
    "take_input_grads",
]


@dataclass(frozen=True)
class GraphMaker:
    """Makes the graphs of one session.

    Attributes:
        backend: captures them.
        pools: their memory.
        host: provides the random generators that chunks draw from.
    """

    backend: GraphBackend
    pools: PoolPlan
    host: Host

    def capture(
        self, label: str, pool: Pool, targets: Sequence[torch.Tensor] = ()
    ) -> AbstractContextManager[Graph]:
        """Capture the operators of the block into one graph. See `GraphBackend.capture`.

        Of ``targets``, which are static tensors, those on another device are not copied to.
        """
        backend, generators = self.backend, self.host.generators()
        memory = [memory_of(t) if t.device == backend.device else None for t in targets]
        return backend.capture(label, pool, generators, memory)


@dataclass(frozen=True)
class SlotPlace:
    """One slot in one bank, before anything is captured into it.

    Attributes:
        chunk_index: index of the chunk.
        index: number of the slot.
        bank: key of the bank.
        label: name of the slot in errors.
        slot: key that all variants of the slot share.
        pool: memory of the slot.
        statics: memory that its graphs read.
    """

    chunk_index: int
    index: int
    bank: Hashable
    label: str
    slot: Hashable
    pool: Pool
    statics: SlotStatics


@dataclass
class CapturedForward:
    """A captured forward whose autograd graph is still alive.

    Attributes that `Slot` does not have:
        live: the memory of the slot's pool that the forward keeps for its backward, and that the
            input half of a split backward keeps for the weight half.
        casting: applies the backward's autocast setting.
        strides: strides of the gradients of ``receiving``.
        results_grads: see `call_with`.
    """

    place: SlotPlace
    inputs: list[torch.Tensor]
    leaves: list[Any]
    spec: Any
    graph: Graph
    live: AddressRanges
    results_grads: dict[int, torch.Tensor]
    copies_outputs: bool = True
    differentiable: tuple[int, ...] = ()
    receiving: tuple[int, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    has_grad_layouts: bool = False
    trained: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    backward_autocast: Autocast | None = None
    grads: list[torch.Tensor] = field(default_factory=list)
    input_grads: list[torch.Tensor | None] = field(default_factory=list)
    backward: Graph | None = None
    weight: Graph | None = None
    marker: GradientMarker | None = None
    casting: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the result, each once."""
        return distinct_tensors(self.leaves)

    @property
    def graphs(self) -> list[Graph]:
        """Return the graphs captured so far, in the order of their replays."""
        return [g for g in (self.graph, self.backward, self.weight) if g is not None]

    def let_go(self, scratch: Pool | None) -> None:
        """Free the results' memory in pools for later captures; replays alone write it."""
        pools = [self.place.pool, *([scratch] if scratch else [])]
        every = [(pool, pool.reserved()) for pool in pools]

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            place = AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])
            pool = next((pool for pool, reserved in every if place & reserved), None)
            if pool is None or type(tensor) is not torch.Tensor or tensor.is_conj():
                return tensor
            shape = tensor.storage_offset(), tensor.shape, tensor.stride()
            free = pool.alias(storage.data_ptr(), storage.nbytes())
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(free, *shape)

        aliases = {id(t): alias(t.detach() if t.requires_grad else t) for t in self.tensors}
        self.leaves = [aliases.get(id(leaf), leaf) for leaf in self.leaves]
        self.input_grads = [None if g is None else alias(g) for g in self.input_grads]

    def release(self) -> None:
        """Release the graphs captured so far."""
        for graph in self.graphs:
            graph.release()


def capture_forward(
    place: SlotPlace,
    chunk: Chunk,
    sample: Call,
    leaves: Sequence[nn.Parameter],
    maker: GraphMaker,
) -> CapturedForward:
    """Capture the forward of one slot in one bank.

    Args:
        place: the slot.
        chunk: runs the forward.
        sample: arguments of the call.
        leaves: aliases of the chunk's parameters.
        maker: makes the graph.

    Raises:
        CaptureError: it cannot be captured; no graph is left.
    """
    statics = place.statics
    inputs = [statics.input_like(i, t) for i, t in enumerate(sample.tensors)]
    versions = [t._version for t in inputs]
    results_grads: dict[int, torch.Tensor] = {}
    before = place.pool.live()
    with (
        torch.enable_grad(),
        maker.capture(f"{place.label} forward", place.pool, inputs) as graph,
    ):
        result = call_with(chunk, sample, inputs, results_grads)
    kept = place.pool.live() - before
    results, spec = flatten(result)
    forward = CapturedForward(place, inputs, results, spec, graph, kept, results_grads)
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
    """Decide how the outputs are handed out, and which of them get a gradient.

    Raises:
        CaptureError: none requires grad, or gradients of other tensors would be lost.
    """
    if chunk.copies_outputs is not None:
        args, kwargs = sample.arguments()
        forward.copies_outputs = chunk.copies_outputs(*args, **kwargs)
    forward.differentiable = tuple(i for i, t in enumerate(forward.tensors) if t.requires_grad)
    gradients = OutputGradients.of(forward.tensors, sample)
    forward.backward_autocast = gradients.autocast
    forward.has_grad_layouts = gradients.has_layouts
    forward.receiving, forward.strides = gradients.receiving, gradients.strides
    forward.casting = gradients.casting
    outputs = [forward.tensors[i] for i in forward.receiving]
    _check_outputs(chunk, outputs, [*forward.inputs, *leaves])
    module_tensors = (
        [*chunk.module.parameters(), *chunk.module.buffers()] if chunk.module is not None else []
    )
    storages = {storage_address(t) for t in (*leaves, *module_tensors)} - {0}
    forward.lent = tuple(i for i, t in enumerate(forward.tensors) if storage_address(t) in storages)


def _check_outputs(
    chunk: Chunk, outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> None:
    """Refuse a forward without a backward, or one whose backward would lose gradients.

    Args:
        chunk: runs the forward.
        outputs: the outputs that require grad.
        declared: inputs and parameters, whose gradients are computed.

    Raises:
        CaptureError: there is no backward, or it would lose gradients; the message names the
            tensors.
    """
    if not outputs:
        raise CaptureError(
            f"{chunk.label}: no output of its forward requires grad, so there is no backward to "
            "capture. Leave the chunk out, train one of its parameters, or set on_failure=eager."
        )
    refuse_undeclared(chunk, outputs, declared)


def refuse_undeclared(
    chunk: Chunk, outputs: Sequence[torch.Tensor], declared: Iterable[torch.Tensor]
) -> None:
    """Refuse leaves below ``outputs`` that take a gradient and are not among ``declared``.

    A leaf reached only through recomputation does not show before its backward.

    Raises:
        CaptureError: there are such leaves; the message names them.
    """
    known = set(map(id, declared))
    lost = [leaf for leaf in leaves_below(outputs) if id(leaf) not in known]
    if lost:
        names = ", ".join(_described(chunk, lost))
        raise CaptureError(
            f"{chunk.label}: its forward uses tensors that require grad and are neither arguments "
            f"nor among its parameters ({names}); a replay would lose their gradients. List them "
            "in Chunk.parameters, pass them as arguments, or detach them."
        )


def _described(chunk: Chunk, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names of tensors in the chunk's module, with their shapes."""
    ids = set(map(id, tensors))
    names: dict[int, str] = {}
    for _, _, value, name in entries(chunk.module, chunk.module_name) if chunk.module else ():
        if id(value) in ids:
            names.setdefault(id(value), f"{name}: ")
    return [f"{names.get(id(t), '')}{tuple(t.shape)} {t.dtype}" for t in tensors]


def _refuse_written(
    label: str, sample: Call, inputs: Sequence[torch.Tensor], versions: Sequence[int]
) -> None:
    """Refuse a chunk that writes into its arguments: a replay writes into copies of them.

    Raises:
        CaptureError: it writes into arguments; the message names them.
    """
    written = [
        path
        for path, tensor, version in zip(argument_paths(sample), inputs, versions, strict=True)
        if tensor._version != version
    ]
    if written:
        raise CaptureError(
            f"{label}: its forward changes {', '.join(written)} in place. A replay works on a "
            "copy and would leave the caller's tensor unchanged. Compute a new tensor and return "
            "it, or keep the state in a buffer of the module."
        )


def capture_backward(
    forward: CapturedForward,
    chunk: Chunk,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    maker: GraphMaker,
) -> None:
    """Capture the backward of a forward, which frees the memory that the forward keeps."""
    place = forward.place
    forward.marker = chunk.new_marker() if chunk.new_marker is not None else None
    outputs = make_output_grads(forward)
    pool = maker.pools.backward_pool(place.pool)
    with (
        sinks.accumulating(leaves, forward.marker) as sums,
        forward.casting(),
        maker.capture(f"{place.label} backward", pool, forward.grads) as graph,
    ):
        # Not autograd.grad, which forbids the inner backwards of recomputation.
        torch.autograd.backward(outputs, forward.grads)
        sums.finish()
        if chunk.end_of_backward is not None:
            chunk.end_of_backward()
    forward.backward = graph
    forward.trained = sinks.interned(tuple(sorted(sums.trained)))
    take_input_grads(forward)


def make_output_grads(forward: CapturedForward) -> list[torch.Tensor]:
    """Make the static gradients of the outputs that get one, and return these outputs."""
    outputs = [forward.tensors[i] for i in forward.receiving]
    forward.grads = [
        forward.place.statics.gradient_like(i, output, strides)
        for i, (output, strides) in enumerate(zip(outputs, forward.strides, strict=True))
    ]
    return outputs


def take_input_grads(forward: CapturedForward) -> None:
    """Move the gradients of the inputs from the captured backward to ``input_grads``."""
    for tensor in forward.inputs:
        forward.input_grads.append(forward.results_grads.pop(id(tensor), tensor.grad))
        tensor.grad = None


def new_slot(forward: CapturedForward, chunk: Chunk, backend: GraphBackend) -> Slot:
    """Return the slot, once all of its graphs are captured."""
    assert len(forward.graphs) > 1
    place = forward.place
    outputs = {id(t): t.detach() if t.requires_grad else t for t in forward.tensors}
    return Slot(
        chunk=place.chunk_index,
        index=place.index,
        label=place.label,
        inputs=tuple(t.detach() for t in forward.inputs),
        outputs=tuple(outputs.get(id(leaf), leaf) for leaf in forward.leaves),
        output_spec=forward.spec,
        differentiable=forward.differentiable,
        receiving=forward.receiving,
        has_grad_layouts=forward.has_grad_layouts,
        trained=forward.trained,
        lent=forward.lent,
        backward_autocast=forward.backward_autocast,
        output_grads=tuple(forward.grads),
        input_grads=tuple(forward.input_grads),
        forward_graph=forward.graph,
        backward_graph=forward.backward,
        weight_graph=forward.weight,
        pool=place.pool,
        grads_lie_in_pool=any(
            g is not None and bool(backend.raw(g) & place.pool.reserved())
            for g in forward.input_grads
        ),
        marker=forward.marker,
        keeps_input_grads=chunk.keeps_input_grads,
        copies_outputs=forward.copies_outputs,
        bank=place.bank,
    )


def footprint(forward: CapturedForward, backend: GraphBackend) -> SlotFootprint:
    """Return the memory that a slot's graphs read and write, for the proof."""
    loaded = AddressRanges()
    for tensor in (*forward.inputs, *forward.grads):
        loaded = loaded | backend.raw(tensor)
    writes = {g.label: g.writes() for g in forward.graphs}
    # Copies into static inputs before a replay are writes too.
    writes[f"{forward.place.label} (its inputs loaded)"] = loaded
    reads = AddressRanges()
    for graph in forward.graphs:
        reads = reads | graph.reads()
    place = forward.place
    return SlotFootprint(place.label, forward.live | loaded, writes, place.slot, reads)

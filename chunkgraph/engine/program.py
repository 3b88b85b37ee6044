"""Programs: which graphs a slot has, and how they are captured.

A program captures a forward, then the actions of its backward. By default there is one,
`ForwardOnly` has none; `chunkgraph.engine.split` adds one that runs a backward in two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.engine.capture.refusals import refuse_without_backward, refuse_written
from chunkgraph.engine.chunk import Chunk, GradientMarker, Host, ReplayAction
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.layout import memory_of
from chunkgraph.engine.passes import Pass
from chunkgraph.engine.slot import InputGrads, Outputs, Slot, StaticInputs, StaticOutputGrads
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.graphs import AddressRanges, Allocation, Graph, GraphBackend, Pool, storage_address
from chunkgraph.memory import PoolPlan

Receive = Callable[[int, torch.Tensor], None]
"""Function that takes the index of a parameter and its gradient."""


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

        Targets, which are static tensors, on other devices are skipped.
        """
        backend, generators = self.backend, self.host.generators()
        memory = [memory_of(t) if t.device == backend.device else None for t in targets]
        return backend.capture(label, pool, generators, memory)


@dataclass(frozen=True)
class Isolated:
    """A chunk whose parameters and gradients are set aside from training during a session.

    Attributes:
        chunk: the chunk.
        sinks: where its backwards add gradients; sinks in ``main_grad`` are overwritten by passes.
        leaves: aliases of its parameters, in order.
        maker: makes its graphs.
    """

    chunk: Chunk
    sinks: GradientSinks
    leaves: Sequence[nn.Parameter]
    maker: GraphMaker


@dataclass(frozen=True)
class BackwardPlan:
    """How the backward of one chunk and bank is captured.

    Attributes:
        held_bytes: bytes that stay allocated between its actions; 0 if unknown.
        in_scratch: what it allocates in scratch; None: what an eager backward allocates.
    """

    held_bytes: int = 0
    in_scratch: tuple[Allocation, ...] | None = None


class GraphProgram:
    """The graphs of a slot: by default a forward and a whole backward.

    Attributes:
        actions: the replays of one microbatch, in order: at most three. A call replays the first,
            autograd the second, and `ChunkGraphs.run_waiting` the third.
        enables_grad: whether the forward is captured with gradients enabled.
    """

    actions: tuple[ReplayAction, ...] = ("F", "B")
    enables_grad = True

    def plan(self, own: Isolated, sample: Call) -> BackwardPlan:  # noqa: ARG002
        """Return how to capture the backward; may run eager passes on the capture stream.

        Raises:
            CaptureError: the backward cannot be captured.
        """
        return BackwardPlan()

    def run_backward(
        self, chunk: Chunk, sample: Call, leaves: Sequence[nn.Parameter], receive: Receive
    ) -> AbstractContextManager[None]:
        """Enclose an eager backward that computes all gradients of the chunk's parameters.

        Args:
            chunk: the chunk.
            sample: the call.
            leaves: aliases of the chunk's parameters.
            receive: takes gradients that autograd does not compute itself.
        """
        del chunk, sample, leaves, receive
        return nullcontext()

    def capture_backward(
        self,
        slot: Slot,
        forward: Pass,
        own: Isolated,
        plan: BackwardPlan,  # noqa: ARG002
        marker: GradientMarker | None,
    ) -> list[torch.Tensor | None]:
        """Capture the actions after the forward into ``slot.graphs``; set ``slot.trained``.

        Memory that the forward keeps is freed.

        Args:
            slot: the slot.
            forward: its captured forward, with ``grads``.
            own: the chunk.
            plan: see `plan`.
            marker: follows the gradients.

        Returns:
            The gradient of each input, or None.
        """
        maker, chunk = own.maker, own.chunk
        pool = maker.pools.backward_pool(slot.memory.pool)
        with (
            own.sinks.accumulating(own.leaves, marker) as sums,
            forward.gradients.casting(),
            maker.capture(f"{slot.label} backward", pool, forward.grads) as graph,
        ):
            forward.backward(keeps_leaves=True)
            sums.finish()
            if chunk.end_of_backward is not None:
                chunk.end_of_backward()
        slot.graphs["B"] = graph
        slot.trained = own.sinks.interned(tuple(sorted(sums.trained)))
        return forward.take_input_grads()


class ForwardOnly(GraphProgram):
    """A forward without a backward, for chunks that train nothing. Its slot is free at once."""

    actions: tuple[ReplayAction, ...] = ("F",)

    def plan(self, own: Isolated, sample: Call) -> BackwardPlan:
        """Refuse a call whose inputs need a gradient.

        Raises:
            CaptureError: an input requires grad.
        """
        if sample.takes_gradients:
            raise CaptureError(
                f"{own.chunk.label}: it is captured without a backward, but an input requires "
                "grad. Pass inputs that do not, or leave out program=FORWARD_ONLY."
            )
        return BackwardPlan(in_scratch=())


FORWARD_ONLY = ForwardOnly()
_WHOLE = GraphProgram()


def program_of(chunk: Chunk) -> GraphProgram:
    """Return the program of a chunk.

    Raises:
        ConfigError: it is no `GraphProgram`.
    """
    program = _WHOLE if chunk.program is None else chunk.program
    if not isinstance(program, GraphProgram):
        raise ConfigError(
            f"{chunk.label}: program is {shown(program)}. Pass FORWARD_ONLY, SPLIT or another "
            "GraphProgram (an instance), or None for a forward and a whole backward."
        )
    return program


def capture_forward(slot: Slot, own: Isolated, sample: Call) -> Pass:
    """Capture the forward of one slot.

    Args:
        slot: the slot; gets its graph and inputs.
        own: the chunk.
        sample: arguments of the call.

    Returns:
        The forward, whose autograd graph is alive.

    Raises:
        CaptureError: it cannot be captured; no graph is left.
    """
    memory, chunk = slot.memory, own.chunk
    inputs = [memory.statics.input_like(i, t) for i, t in enumerate(sample.tensors)]
    versions = [t._version for t in inputs]
    before = memory.pool.live()
    forward = Pass(chunk, sample, inputs)
    with (
        torch.set_grad_enabled(chunk.enables_grad),
        own.maker.capture(f"{slot.label} forward", memory.pool, inputs) as graph,
    ):
        forward.forward()
    memory.live = memory.kept = memory.pool.live() - before
    slot.graphs["F"] = graph
    slot.inputs = StaticInputs([t.detach() for t in inputs], graph.copy_nodes)
    try:
        refuse_written(chunk.label, sample, inputs, versions)
        if chunk.has_backward:
            declared = [*inputs, *own.leaves]
            refuse_without_backward(chunk, forward.leaves, forward.outputs, declared)
    except CaptureError:
        graph.release()
        raise
    return forward


def finish_slot(
    slot: Slot, forward: Pass, own: Isolated, input_grads: Sequence[torch.Tensor | None]
) -> None:
    """Set what the slot hands out, once all of its graphs are captured.

    Captures of other variants may use the memory of the results; the caller reads them before.

    Args:
        slot: the slot.
        forward: its captured forward, whose result is dropped.
        own: the chunk.
        input_grads: the gradient of each input, or None.
    """
    chunk, pools = own.chunk, own.maker.pools
    tensors, gradients = forward.tensors, forward.gradients
    module_tensors = (
        [*chunk.module.parameters(), *chunk.module.buffers()] if chunk.module is not None else []
    )
    storages = {storage_address(t) for t in (*own.leaves, *module_tensors)} - {0}
    lent = tuple(i for i, t in enumerate(tensors) if storage_address(t) in storages)
    differentiable = tuple(i for i, t in enumerate(tensors) if t.requires_grad)
    args, kwargs = forward.sample.arguments()
    are_copied = chunk.copies_outputs is None or chunk.copies_outputs(*args, **kwargs)
    own_pools = [slot.memory.pool, *([pools.scratch] if pools.scratch else [])]
    memory = [(pool, pool.reserved()) for pool in own_pools]
    aliases = {id(t): _alias(t.detach() if t.requires_grad else t, memory) for t in tensors}
    leaves = [aliases.get(id(leaf), leaf) for leaf in forward.leaves]
    forward.leaves = ()
    slot.outputs = Outputs(leaves, forward.spec, differentiable, lent, are_copied=are_copied)
    slot.input_grads = InputGrads(
        [None if g is None else _alias(g, memory) for g in input_grads],
        are_copied=chunk.keeps_input_grads,
    )
    if chunk.has_backward:
        # Of a backward whose first action has no graph, the gradients are not loaded by one.
        first = slot.graphs.get(chunk.actions[1])
        slot.output_grads = StaticOutputGrads(
            slot.label,
            gradients.receiving,
            forward.grads,
            first.copy_nodes if first is not None else (),
            has_layouts=gradients.has_layouts,
            lent=lent,
            autocast=gradients.autocast,
        )


def _alias(tensor: torch.Tensor, memory: Sequence[tuple[Pool, AddressRanges]]) -> torch.Tensor:
    """Return an alias of a tensor that keeps no block of a pool in use."""
    storage = tensor.untyped_storage()
    place = AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])
    pool = next((pool for pool, reserved in memory if place & reserved), None)
    if pool is None or type(tensor) is not torch.Tensor or tensor.is_conj():
        return tensor
    shape = tensor.storage_offset(), tensor.shape, tensor.stride()
    free = pool.alias(storage.data_ptr(), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(free, *shape)

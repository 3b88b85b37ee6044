"""Run a captured chunk eagerly next to its replays, without side effects on training.

Random state, the chunk's tensors, gradients and the state of `Host.preserving` are restored. Other
leaves replace the parameters, new ones in each pass, so that no hook sees their gradients. Casts
that the caller's autocast block has cached are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.parameter_aliases import ParameterAliases
from chunkgraph.engine.capture.restore import ChunkState, restoring, versions
from chunkgraph.engine.capture.saved import SavedTensor, saved_tensors
from chunkgraph.engine.capture.self_test import Measured
from chunkgraph.engine.chunk import Chunk, Host
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.passes import GradientOrder, Pass
from chunkgraph.engine.program import program_of
from chunkgraph.engine.tree import Call
from chunkgraph.graphs import GraphBackend


@dataclass
class EagerPass:
    """An eager forward whose autograd graph is alive until its backward.

    Attributes:
        call: the pass.
        measured: digests of what the forward computed.
        saved: tensors that it keeps for the backward.
        versions: version counters right after the forward, which the backward checks.
        aliases: the leaves that replace the parameters.
    """

    call: Pass
    measured: Measured
    saved: tuple[SavedTensor, ...]
    versions: Any
    aliases: ParameterAliases


class EagerPasses:
    """Eager passes of one chunk in one step. Holds gradient buffers: drop it after the step.

    Args:
        chunk: the chunk.
        call: its captured call, without tensors (`Call.emptied`).
        gradients: the buffers that replayed backwards add to, one for each parameter.
        state: memory that the chunk's passes may write, and restore.
        backend: the backend of the graphs.
        host: the training loop around the chunks.
    """

    def __init__(
        self,
        chunk: Chunk,
        call: Call,
        gradients: Sequence[torch.Tensor],
        state: Sequence[torch.Tensor],
        backend: GraphBackend,
        host: Host,
    ) -> None:
        self._chunk = chunk
        self._call = call
        self._gradients = tuple(gradients)
        self._backend, self._host = backend, host
        self._state = state

    @cached_property
    def _sums(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(g) for g in self._gradients)

    def generators(self) -> list[torch.Generator]:
        """Return the generators that a pass may draw from: the host's, the device's, further."""
        own = [torch.default_generator]
        if self._backend.device.type == "cuda":
            own.append(self._backend.default_generator)
        return [*own, *self._host.generators()]

    def state(self) -> ChunkState:
        """Copy the present state that these passes restore."""
        return ChunkState.now(self._state, self.generators())

    def forward(
        self,
        tensors: Sequence[torch.Tensor],
        with_grad: Sequence[bool],
        begin: ChunkState | None = None,
    ) -> EagerPass:
        """Run the forward on copies of ``tensors``, from ``begin`` or the present state."""
        inputs = [t.detach().clone() for t in tensors]
        for tensor, has_grad in zip(inputs, with_grad, strict=True):
            tensor.requires_grad_(has_grad)
        layers = LayerWatch()
        call = Pass(self._chunk, self._call.filled(inputs), inputs)
        aliases = ParameterAliases(self._chunk.module, self._chunk.parameters)
        with self._untouched(aliases, begin):
            with layers.watching([self._chunk]):
                call.forward()
            measured = Measured.of(call.leaves, self._chunk.buffers, self.generators())
            saved = saved_tensors(call.leaves, layers)
            counts = versions(self._state)
        return EagerPass(call, measured, tuple(saved), counts, aliases)

    def backward(
        self,
        eager: EagerPass,
        grads: Sequence[torch.Tensor],
        *,
        accumulates: bool = True,
        begin: ChunkState | None = None,
    ) -> tuple[Sequence[torch.Tensor], Sequence[int]]:
        """Run the backward of a pass.

        Args:
            eager: a pass whose backward has not run.
            grads: the gradient of each output that gets one.
            accumulates: whether to add to the gradients so far, or to zeros.
            begin: the `state` that a recomputation reads; None for the present one.

        Returns:
            For each parameter the expected contents of its gradient buffer, valid until the next
            backward of the chunk; and the order in which the gradients were ready.
        """
        leaves, order = eager.aliases.leaves, GradientOrder()
        with torch.no_grad():
            for total, gradient in zip(self._sums, self._gradients, strict=True):
                if accumulates:
                    total.copy_(gradient)
                else:
                    total.zero_()
        with self._untouched(eager.aliases, begin):
            sinks = GradientSinks(leaves)
            with sinks.accumulating(leaves, order) as sums:
                eager.versions.__exit__()  # the backward compares with these versions
                eager.call.grads = list(grads)
                program = program_of(self._chunk)
                with program.run_backward(self._chunk, eager.call.sample, leaves, sums.add):
                    eager.call.backward()
                sums.finish()
        return self._sums, order.seen

    @contextmanager
    def _untouched(self, aliases: ParameterAliases, begin: ChunkState | None) -> Iterator[None]:
        """Restore all state on exit; let ``aliases`` add to the buffers of these passes."""
        # Without a module they are the parameters themselves.
        originals = [dict(leaf.__dict__) for leaf in aliases.leaves]
        with (
            self._host.preserving(),
            restoring(self._state, self.generators(), begin),
            self._host.verifying(),
            aliases.in_place(),
        ):
            try:
                for leaf, total in zip(aliases.leaves, self._sums, strict=True):
                    leaf.main_grad = total  # type: ignore[attr-defined]
                yield
            finally:
                for leaf, attributes in zip(aliases.leaves, originals, strict=True):
                    leaf.__dict__.clear()
                    leaf.__dict__.update(attributes)

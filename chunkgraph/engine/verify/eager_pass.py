"""Run a captured chunk eagerly next to its replays, without side effects on training.

Random state, buffers, gradients and the state of `Host.preserving` are restored. Other leaves
replace the parameters, new ones in each pass, so that no hook sees their gradients. Casts that the
caller's autocast block has cached are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.parameter_aliases import ParameterAliases
from chunkgraph.engine.capture.preserved import versions
from chunkgraph.engine.capture.saved import SavedTensor, saved_tensors
from chunkgraph.engine.capture.static_inputs import call_with
from chunkgraph.engine.chunk import Chunk, Host
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.program import program_of
from chunkgraph.engine.tree import Call, distinct_tensors, flatten
from chunkgraph.engine.verify.state import ChunkState, restored
from chunkgraph.graphs import GraphBackend

__all__ = ["EagerBackward", "EagerForward", "EagerPasses", "Surroundings"]

OnOutput = Callable[[str, Any], None]


@dataclass(frozen=True)
class Surroundings:
    """The context of an eager pass.

    Attributes:
        backend: the backend of the graphs.
        host: the program around the chunks.
    """

    backend: GraphBackend
    host: Host

    @contextmanager
    def untouched(
        self, written: Sequence[torch.Tensor], begin: ChunkState | None = None
    ) -> Iterator[None]:
        """Restore all state on exit, including tensors that the chunk writes in this block.

        Args:
            written: the tensors that the chunk writes.
            begin: the state of ``written`` that the block begins with (see `state_of`); None for
                the present one.
        """
        generators = self.host.generators()
        with ExitStack() as stack:
            stack.enter_context(self.host.preserving())
            stack.enter_context(restored(written, self.backend.device, generators, begin))
            stack.enter_context(self.host.verifying())
            yield

    def state_of(self, buffers: Sequence[torch.Tensor]) -> ChunkState:
        """Return a copy of the random state and the buffers."""
        return ChunkState.now(buffers, self.backend.device, self.host.generators())


@dataclass(frozen=True)
class EagerForward:
    """An eager forward whose autograd graph is alive.

    Attributes:
        inputs: copies of the inputs of the replay.
        leaves: leaves of the result.
        after: random state and buffers right after the forward.
        saved: tensors that it keeps for the backward.
        versions: version counters right after the forward, which the backward checks.
        aliases: the leaves that replace the parameters.
    """

    inputs: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    after: ChunkState
    saved: tuple[SavedTensor, ...]
    versions: Any
    aliases: ParameterAliases

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors among the result's leaves, each once."""
        return distinct_tensors(self.leaves)


@dataclass(frozen=True)
class EagerBackward:
    """The results of an eager backward.

    Attributes:
        input_grads: the gradient of each input, or None.
        sums: for each parameter, the expected contents of its gradient buffer; valid until the
            next backward of the chunk.
        order: parameters in the order in which their gradients were ready.
    """

    input_grads: tuple[torch.Tensor | None, ...]
    sums: tuple[torch.Tensor, ...]
    order: tuple[int, ...]


@dataclass
class _Order:
    """Record the order in which gradients are accumulated (a `GradientMarker`)."""

    seen: list[int] = field(default_factory=list)

    def accumulated(self, index: int) -> None:
        self.seen.append(index)

    def replayed(self) -> None:
        raise AssertionError("an eager pass is not replayed")


class EagerPasses:
    """Eager passes of one chunk in one step. Holds gradient buffers: drop it after the step.

    Args:
        chunk: the chunk.
        call: its captured call, without tensors (`Call.emptied`).
        gradients: the buffers that replayed backwards add to, one for each parameter.
        surroundings: the context of the passes.
        written: tensors, other than buffers, that the chunk updates in place.
    """

    def __init__(
        self,
        chunk: Chunk,
        call: Call,
        gradients: Sequence[torch.Tensor],
        surroundings: Surroundings,
        written: Sequence[torch.Tensor] = (),
    ) -> None:
        self._written = (*chunk.buffers, *written)
        self._chunk = chunk
        self._call = call
        self._gradients = tuple(gradients)
        self._around = surroundings
        self._sums = [torch.empty_like(g) for g in self._gradients]

    def forward(
        self,
        tensors: Sequence[torch.Tensor],
        with_grad: Sequence[bool],
        on_output: OnOutput | None = None,
        begin: ChunkState | None = None,
    ) -> EagerForward:
        """Run the forward on copies of ``tensors``, from ``begin`` or the present state."""
        inputs = [t.detach().clone() for t in tensors]
        for tensor, has_grad in zip(inputs, with_grad, strict=True):
            tensor.requires_grad_(has_grad)
        watch = LayerWatch()
        aliases = ParameterAliases(self._chunk.module, self._chunk.parameters)
        with (
            self._around.untouched(self._written, begin),
            aliases.in_place(),
            self._own_sums(aliases.leaves),
        ):
            with watch.watching([self._chunk], on_output):
                results, _ = flatten(call_with(self._chunk, self._call, inputs))
            after = self._around.state_of(self._chunk.buffers)
            saved = saved_tensors(results, watch)
            counts = versions(self._written)
        return EagerForward(tuple(inputs), tuple(results), after, tuple(saved), counts, aliases)

    def state(self) -> ChunkState:
        """Copy the present state that these passes restore."""
        return self._around.state_of(self._written)

    def backward(
        self,
        forward: EagerForward,
        differentiable: Sequence[int],
        grads: Sequence[torch.Tensor],
        *,
        accumulates: bool = True,
        begin: ChunkState | None = None,
    ) -> EagerBackward:
        """Run the backward of ``forward``, once.

        Args:
            forward: a forward of these passes whose backward has not run.
            differentiable: indices of the result's tensors that get a gradient.
            grads: the gradient of each.
            accumulates: whether to add to the gradients so far, or to zeros.
            begin: the `state` that a recomputation reads; None for the present one.
        """
        outputs = [forward.tensors[i] for i in differentiable]
        leaves, order = forward.aliases.leaves, _Order()
        with self._own_sums(leaves):
            sinks = GradientSinks(leaves)
        with torch.no_grad():
            for total, gradient in zip(self._sums, self._gradients, strict=True):
                if accumulates:
                    total.copy_(gradient)
                else:
                    total.zero_()
        with (
            self._around.untouched(self._written, begin),
            forward.aliases.in_place(),
            self._own_sums(leaves),
            sinks.accumulating(leaves, order) as sums,
        ):
            forward.versions.__exit__()  # the backward compares with these versions
            program = program_of(self._chunk)
            with program.run_backward(self._chunk, self._call, leaves, sums.add):
                # As in a capture: not autograd.grad, which forbids recomputation.
                torch.autograd.backward(outputs, list(grads))
            sums.finish()
        input_grads = tuple(t.grad for t in forward.inputs)
        return EagerBackward(input_grads, tuple(self._sums), tuple(order.seen))

    @contextmanager
    def _own_sums(self, leaves: Sequence[nn.Parameter]) -> Iterator[None]:
        """Set the buffers of these passes as the leaves' ``main_grad`` in this block."""
        originals = [dict(leaf.__dict__) for leaf in leaves]
        try:
            for leaf, total in zip(leaves, self._sums, strict=True):
                leaf.main_grad = total  # type: ignore[attr-defined]
            yield
        finally:
            for leaf, attributes in zip(leaves, originals, strict=True):
                leaf.__dict__.clear()
                leaf.__dict__.update(attributes)

"""The two halves of a slot's backward: planned from eager passes, then captured one by one.

The input half allocates from the slot's own pool, where it leaves memory for the weight half. The
weight half uses scratch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkgraph.engine.capture.eager_call import EagerCall
from chunkgraph.engine.capture.preserved import tensors_kept
from chunkgraph.engine.capture.slot_capture import (
    CapturedForward,
    GraphMaker,
    make_output_grads,
    take_input_grads,
)
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.gradients import GradientSinks, collecting
from chunkgraph.engine.host import Host
from chunkgraph.engine.signature import Call
from chunkgraph.engine.split.deferral import Deferral, Receive
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.engine.split.trace import BackwardTrace, BackwardTracer, ForwardWatch
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs import GraphBackend, block_bytes

__all__ = ["SplitPlan", "capture_halves", "plan_split", "refuse_shared_with_split"]


@dataclass(frozen=True)
class SplitPlan:
    """The plan for splitting the backward of one chunk and bank.

    Attributes:
        trace: Operators of the backward; None if no input takes a gradient, so that all of it is
            the weight half.
        held_bytes: Bytes that stay allocated between the two halves; 0 if unknown.
        scratch_bytes: `block_bytes` of what the weight half allocates.
    """

    trace: BackwardTrace | None = None
    held_bytes: int = 0
    scratch_bytes: int = 0


def plan_split(
    chunk: Chunk,
    sample: Call,
    leaves: Sequence[nn.Parameter],
    backend: GraphBackend,
    host: Host,
) -> SplitPlan:
    """Watch one whole backward, run another one in halves, and return how to capture them.

    The chunk's tensors, except ``main_grad``, and the random state are unchanged afterwards.

    Args:
        chunk: A split chunk.
        sample: A call of the chunk; its values are copied.
        leaves: Aliases of the chunk's parameters.
        backend: The backend whose stream runs the passes.
        host: The program around the chunk.

    Raises:
        CaptureError: The backward cannot be split.
    """
    if not sample.takes_gradients:
        return SplitPlan()
    delayed = DelayedModules(chunk.module, chunk.label)
    watched = ForwardWatch()
    take: Receive = _drop
    with (
        backend.on_capture_stream(),
        backend.preserve_random_state(host.generators()),
        host.preserving(),
        tensors_kept(chunk),
        # Entered first: of two hooks on a leaf, the first takes the gradient.
        collecting(leaves, lambda index, gradient: take(index, gradient)),  # noqa: PLW0108
    ):
        with watched:
            before = EagerCall(chunk, sample).forward()
        before.make_output_grads()
        tracer = BackwardTracer(chunk.label, watched, chunk.buffers)
        take = tracer.take
        with before.casting(), tracer:
            before.backward()
        trace = tracer.trace(_present(before.input_grads()))
        delayed.run(leaves, _drop)
        delayed.refuse_left()
        del before

        num_bytes = backend.allocated_bytes()
        forward = EagerCall(chunk, sample).forward()
        forward.make_output_grads()
        deferral = Deferral(trace, chunk.label)
        take = deferral.take
        with backend.observe_allocations() as log:
            with forward.casting(), _explained(chunk.label):
                with deferral:
                    forward.backward()
                if chunk.end_of_backward is not None:
                    chunk.end_of_backward()
            grads = _present(forward.input_grads())
            held_bytes = backend.allocated_bytes() - num_bytes
            num_input = log.num_events()
            del grads, forward
            deferral.run(_drop)
            delayed.run(leaves, _drop)
            of_weight = [a for a in log.allocations() if a.begin >= num_input and a.end is not None]
    return SplitPlan(trace, max(0, held_bytes), block_bytes(of_weight))


def _present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def refuse_shared_with_split(chunks: Sequence[Chunk]) -> None:
    """Refuse parameters that a split chunk shares with another one.

    The schedule determines when each adds its gradients, and so the order of the sum.

    Raises:
        CaptureError: There are such parameters; the message names the chunks.
    """
    owners: dict[int, Chunk] = {}
    for chunk in chunks:
        for parameter in chunk.parameters:
            other = owners.setdefault(id(parameter), chunk)
            if other is not chunk and (other.is_split or chunk.is_split):
                raise CaptureError(
                    f"{chunk.label} and {other.label} share a parameter of shape "
                    f"{tuple(parameter.shape)}, and at least one of their backwards is split, so "
                    "the order in which their gradients are added would depend on the schedule. "
                    "Capture both with backward='whole', or use a schedule that splits no backward."
                )


@contextmanager
def _explained(label: str) -> Iterator[None]:
    """Explain an error in the first half of a backward that has just run as a whole."""
    try:
        yield
    except ChunkGraphError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{label}: its backward runs as a whole, but not in halves "
            f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). A kernel that torch "
            "does not know may read a weight gradient, which is not computed yet. Capture the "
            "chunk with backward='whole', or use a schedule that splits no backward."
        ) from error


def capture_halves(
    forward: CapturedForward,
    chunk: Chunk,
    sinks: GradientSinks,
    leaves: Sequence[nn.Parameter],
    maker: GraphMaker,
    plan: SplitPlan,
    on_graph: Callable[[], None],
) -> None:
    """Capture both halves of a forward's backward; nothing of it is alive afterwards.

    Args:
        forward: The slot's captured forward.
        chunk: The slot's chunk.
        sinks: Sinks of the chunk's gradients.
        leaves: Aliases of the chunk's parameters.
        maker: Maker of the graphs.
        plan: Plan of the chunk in this bank.
        on_graph: Function called after each graph.

    Raises:
        CaptureError: A half cannot be captured.
    """
    place = forward.place
    forward.marker = chunk.new_marker() if chunk.new_marker is not None else None
    make_output_grads(forward)
    weights = _Weights(forward, chunk, sinks, leaves)
    label = f"{place.label} weight gradient"
    pool = maker.pools.backward_pool(place.pool)
    if plan.trace is None:
        with weights.whole(), forward.casting(), maker.capture(label, pool) as graph:
            _run_backward(forward, chunk, nullcontext())
            weights.finish()
        forward.weight = graph
    else:
        deferral = Deferral(plan.trace, place.label)
        with weights.taken(deferral.take):
            _capture_input_half(forward, chunk, maker, deferral)
            on_graph()
            with maker.capture(label, pool) as graph:
                deferral.run(weights.sums.add)
                weights.finish()
        forward.weight = graph
    on_graph()
    forward.trained = sinks.interned(tuple(sorted(weights.sums.trained)))
    if plan.trace is None:
        take_input_grads(forward)


def _capture_input_half(
    forward: CapturedForward, chunk: Chunk, maker: GraphMaker, deferral: Deferral
) -> None:
    place = forward.place
    before = place.pool.live()
    label = f"{place.label} input gradient"
    with forward.casting(), maker.capture(label, place.pool, forward.grads) as graph:
        _run_backward(forward, chunk, deferral)
    forward.backward = graph
    take_input_grads(forward)
    # Memory that the forward keeps is read later, or was freed for later allocations.
    forward.live = forward.live | (place.pool.live() - before)


def _run_backward(
    forward: CapturedForward, chunk: Chunk, deferral: AbstractContextManager[Any]
) -> None:
    with deferral:
        torch.autograd.backward([forward.tensors[i] for i in forward.receiving], forward.grads)
    if chunk.end_of_backward is not None:
        chunk.end_of_backward()


class _Weights:
    """Add the gradients of one captured backward to their sinks.

    Attributes:
        sums: The gradients that are added.
    """

    def __init__(
        self,
        forward: CapturedForward,
        chunk: Chunk,
        sinks: GradientSinks,
        leaves: Sequence[nn.Parameter],
    ) -> None:
        self.sums = sinks.accumulation(forward.marker)
        self._forward, self._leaves = forward, leaves
        self._delayed = DelayedModules(chunk.module, chunk.label)
        held = {id(p) for module in self._delayed.modules for p in module.parameters()}
        self._of_delayed = {i for i, leaf in enumerate(leaves) if id(leaf) in held}
        self._announced: list[int] = []

    @contextmanager
    def taken(self, take: Receive | None = None) -> Iterator[None]:
        """Pass gradients that autograd computes here to ``take``; None adds them immediately."""

        def receive(index: int, gradient: torch.Tensor) -> None:
            if not getattr(self._leaves[index], "grad_added_to_main_grad", False):
                (take or self.sums.add)(index, gradient)
            elif index in self._of_delayed or take is None:
                self._announced.append(index)  # by a dummy gradient
            else:
                raise CaptureError(
                    f"{self._forward.place.label}: a layer adds the gradient of parameter {index} "
                    f"(shape {tuple(self._leaves[index].shape)}) to main_grad while the input "
                    "gradient is computed. Set delay_wgrad_compute=True, or "
                    "gradient_accumulation_fusion=False."
                )

        with collecting(self._leaves, receive):
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Add all gradients that a whole backward computes here."""
        with self.taken(), self._delayed.computing_at_once():
            yield

    def finish(self) -> None:
        """Compute the gradients that modules have delayed, and add all that wait."""
        self._delayed.run(self._leaves, self.sums.add)
        self.sums.finish()
        for index in self._announced:
            self.sums.note(index)


def _drop(_index: int, _gradient: torch.Tensor) -> None:
    """Drop a gradient."""

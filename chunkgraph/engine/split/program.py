"""`SPLIT`: a backward in two halves, planned from eager passes and captured one by one.

The input half allocates from the slot's own pool, where it leaves memory for the weight half. The
weight half uses scratch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from chunkgraph.engine.capture.accumulate import collecting
from chunkgraph.engine.capture.restore import restoring_writes
from chunkgraph.engine.chunk import Chunk, GradientMarker, ReplayAction
from chunkgraph.engine.passes import Pass
from chunkgraph.engine.program import BackwardPlan, GraphProgram, Isolated, Receive
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.split.deferral import REMEDY, Deferral, TracedOperator
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.engine.split.trace import BackwardTracer, ForwardWatch
from chunkgraph.engine.tree import Call
from chunkgraph.errors import CaptureError, ChunkGraphError


@dataclass(frozen=True)
class SplitPlan(BackwardPlan):
    """The plan for splitting the backward of one chunk and bank.

    Attributes:
        trace: Operators of the backward; None if no input takes a gradient, so that all of it is
            the weight half.
    """

    trace: Sequence[TracedOperator] | None = None


class Split(GraphProgram):
    """A forward, the input half of its backward, and the weight half.

    Autograd's ``backward()`` computes the input gradients. `WeightBackwards` adds the weight
    gradients when the schedule asks for them; the slot is in use until then. A chunk's
    ``before_backward`` runs before the first half, its ``end_of_backward`` at the end of it.
    """

    actions: tuple[ReplayAction, ...] = ("F", "I", "W")

    def plan(self, own: Isolated, sample: Call) -> SplitPlan:
        """Watch one whole backward, run another one in halves, and return how to capture them.

        The chunk's tensors and the random state are unchanged afterwards.

        Raises:
            CaptureError: The backward cannot be split.
        """
        if not sample.takes_gradients:
            return SplitPlan()
        chunk, leaves, backend, host = own.chunk, own.leaves, own.maker.backend, own.maker.host
        delayed = DelayedModules(chunk.module, chunk.label)
        watched = ForwardWatch()
        take: Receive = _drop
        with (
            backend.on_capture_stream(),
            backend.preserve_random_state(host.generators()),
            host.preserving(),
            restoring_writes(chunk),
            # Entered first: of two hooks on a leaf, the first takes the gradient.
            collecting(leaves, lambda index, gradient: take(index, gradient)),  # noqa: PLW0108
        ):
            with watched:
                before = Pass(chunk, sample).forward()
            before.make_output_grads()
            tracer = BackwardTracer(watched, chunk.buffers)
            take = tracer.take
            with before.gradients.casting(), tracer:
                before.backward()
            trace = tracer.trace(_present(before.input_grads()))
            delayed.run(leaves, _drop)
            delayed.refuse_left()
            del before

            num_bytes = backend.allocated_bytes()
            forward = Pass(chunk, sample).forward()
            forward.make_output_grads()
            deferral = Deferral(trace, chunk.label)
            take = deferral.take
            with backend.observe_allocations() as log:
                with forward.gradients.casting(), _explained(chunk.label):
                    with deferral:
                        forward.backward()
                    _end_backward(chunk)
                grads = _present(forward.input_grads())
                held_bytes = backend.allocated_bytes() - num_bytes
                num_input = log.num_events()
                del grads, forward
                deferral.run(_drop)
                delayed.run(leaves, _drop)
                of_weight = (a for a in log.allocations() if a.begin >= num_input and a.end)
                in_scratch = tuple(of_weight)
        return SplitPlan(max(0, held_bytes), in_scratch, trace)

    @contextmanager
    def run_backward(
        self, chunk: Chunk, sample: Call, leaves: Sequence[nn.Parameter], receive: Receive
    ) -> Iterator[None]:
        """Compute what modules delay themselves: without an input half, at once."""
        delayed = DelayedModules(chunk.module, chunk.label)
        with nullcontext() if sample.takes_gradients else delayed.computing_at_once():
            yield
            delayed.run(leaves, receive)

    def capture_backward(
        self,
        slot: Slot,
        forward: Pass,
        own: Isolated,
        plan: BackwardPlan,
        marker: GradientMarker | None,
    ) -> list[torch.Tensor | None]:
        """Capture both halves of the backward. See `GraphProgram`.

        Raises:
            CaptureError: A half cannot be captured.
        """
        assert isinstance(plan, SplitPlan)
        maker = own.maker
        weights = _Weights(slot.label, own, marker)
        label = f"{slot.label} weight gradient"
        pool = maker.pools.backward_pool(slot.memory.pool)
        if plan.trace is None:
            at_once, cast = weights.delayed.computing_at_once(), forward.gradients.casting()
            with weights.taken(), at_once, cast, maker.capture(label, pool) as graph:
                forward.backward(keeps_leaves=True)
                _end_backward(own.chunk)
                weights.finish()
            input_grads = forward.take_input_grads()
        else:
            deferral = Deferral(plan.trace, slot.label)
            with weights.taken(deferral.take):
                input_grads = _capture_input_half(slot, forward, own, deferral)
                with maker.capture(label, pool) as graph:
                    deferral.run(weights.sums.add)
                    weights.finish()
        slot.graphs["W"] = graph
        slot.trained = own.sinks.interned(tuple(sorted(weights.sums.trained)))
        return input_grads


SPLIT = Split()


def _capture_input_half(
    slot: Slot, forward: Pass, own: Isolated, deferral: Deferral
) -> list[torch.Tensor | None]:
    pool = slot.memory.pool
    before = pool.live()
    label = f"{slot.label} input gradient"
    with forward.gradients.casting(), own.maker.capture(label, pool, forward.grads) as graph:
        with deferral:
            forward.backward(keeps_leaves=True)
        _end_backward(own.chunk)
    slot.graphs["I"] = graph
    input_grads = forward.take_input_grads()
    # Memory that the forward keeps is read later, or was freed for later allocations.
    slot.memory.live = slot.memory.live | (pool.live() - before)
    return input_grads


def _end_backward(chunk: Chunk) -> None:
    if chunk.end_of_backward is not None:
        chunk.end_of_backward()


def _present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


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
            f"does not know may read a weight gradient, which is not computed yet. {REMEDY}"
        ) from error


class _Weights:
    """Add the gradients of one captured backward to their sinks.

    Attributes:
        sums: The gradients that are added.
        delayed: The modules that delay theirs.
    """

    def __init__(self, label: str, own: Isolated, marker: GradientMarker | None) -> None:
        self.sums = own.sinks.accumulation(marker)
        self._label, self._sinks, self._leaves = label, own.sinks, own.leaves
        leaves = own.leaves
        self.delayed = DelayedModules(own.chunk.module, own.chunk.label)
        held = {id(p) for module in self.delayed.modules for p in module.parameters()}
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
                    f"{self._label}: a layer adds the gradient of parameter {index} "
                    f"(shape {tuple(self._leaves[index].shape)}) to main_grad while the input "
                    "gradient is computed. Set delay_wgrad_compute=True, or "
                    "gradient_accumulation_fusion=False."
                )

        with collecting(self._leaves, receive):
            yield

    def finish(self) -> None:
        """Compute the gradients that modules have delayed, and add all that wait."""
        self.delayed.run(self._leaves, self.sums.add)
        self.sums.finish()
        for index in self._announced:
            self.sums.note(index)


def _drop(_index: int, _gradient: torch.Tensor) -> None:
    """Drop a gradient."""

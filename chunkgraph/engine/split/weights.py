"""`WeightBackwards`: the weight halves of split backwards, run when the schedule asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.engine import ChunkGraphs
from chunkgraph.engine.observer import Observer
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.engine.split.program import Split
from chunkgraph.engine.tree import distinct_tensors, flatten
from chunkgraph.errors import SlotError

__all__ = ["WeightBackwards"]


class WeightBackwards(Observer):
    """Compute the weight gradients of the chunks with a split backward (``program=SPLIT``).

    Autograd's ``backward()`` computes only the input gradients of a microbatch. `run` adds its
    weight gradients to ``param.grad`` or ``main_grad``, at any time before the step ends; its slot
    is in use until then. Each chunk runs them in the order of the input gradients, so the sums have
    the bits of whole backwards.

    A schedule calls the same methods in every step, whatever its mode. In an eager step,
    ``backward()`` computes and adds everything that the modules do not delay themselves
    (``backward_dw``), and `run` does only the rest; the sums are the same.

    Example:
        A whole backward (``B``), and the hook of `torch.distributed.pipelining`::

            weights = WeightBackwards(graphs)
            loss.backward()
            weights.run(c)

            PipelineStage(..., dw_builder=lambda: weights.runner(c))

    Args:
        graphs: The graphs of the chunks.
    """

    def __init__(self, graphs: ChunkGraphs) -> None:
        self._chunks = chunks = graphs.chunks
        self._delayed = [DelayedModules(c.module, c.label) if _splits(c) else None for c in chunks]
        self._graphs = graphs
        self._eager: _EagerStep | None = None
        graphs.observe(self)

    def run(self, c: int) -> None:
        """Compute the weight gradients of the microbatch of chunk ``c`` that has waited longest.

        Raises:
            SlotError: No microbatch waits, or the chunk's backward is not split.
        """
        self._run(c, None)

    def runner(self, c: int) -> Callable[[], None]:
        """Return a function that computes the weight gradients of chunk ``c``'s latest microbatch.

        That is the one whose ``backward()`` has just returned. Call the function once, in the same
        step, after the weight gradients of all earlier microbatches.

        Raises:
            SlotError: No microbatch waits, or the chunk's backward is not split. The function
                raises it if it is not its microbatch's turn.
        """
        self._check_split(c)
        waiting = self._waiting(c)
        if not waiting:
            raise self._none_waits(c)
        ticket = waiting[-1]
        return lambda: self._run(c, ticket)

    def num_pending(self, c: int) -> int:
        """Return how many microbatches of chunk ``c`` wait for their weight gradients."""
        return len(self._waiting(c))

    def observes(self, step: int | None) -> bool:
        """Observe eager steps."""
        return step is None and any(map(_splits, self._chunks))

    def begin_step(self, step: int | None) -> None:  # noqa: ARG002
        """Begin an eager step."""
        self._eager = _EagerStep(self._chunks, self._delayed)

    def called(self, c: int, result: Any) -> None:
        """Let the microbatch of an eager call wait, once its backward begins."""
        if self._eager is not None and _splits(self._chunks[c]) and torch.is_grad_enabled():
            self._eager.watch(c, result)

    def end_step(self, *, has_failed: bool) -> None:
        """End an eager step.

        Raises:
            SlotError: Weight gradients were not run when the step ended.
        """
        step, self._eager = self._eager, None
        if step is not None and not has_failed:
            step.end()

    def _run(self, c: int, ticket: int | None) -> None:
        self._check_split(c)
        if self._eager is None:
            self._graphs.run_waiting(c, ticket)
            return
        waiting = self._eager.waiting[c]
        if not waiting:
            raise self._none_waits(c)
        if ticket is not None and ticket != waiting[0]:
            problem = (
                f"microbatch {waiting[0]} comes first, since the order affects the bits of the sums"
                if ticket in waiting
                else "it has been run already"
            )
            raise SlotError(
                f"{self._chunks[c].label}: the weight gradient of microbatch {ticket} cannot run: "
                f"{problem}. Run each once, in the order of the input gradients."
            )
        self._eager.run(c)

    def _waiting(self, c: int) -> Sequence[int]:
        return self._graphs.waiting(c) if self._eager is None else self._eager.waiting[c]

    def _check_split(self, c: int) -> None:
        if not _splits(self._chunks[c]):
            raise SlotError(
                f"{self._chunks[c].label}: its backward is not split and computes the weight "
                "gradients itself. Pass Chunk.from_module(module, label, program=SPLIT) to run "
                "them separately."
            )

    def _none_waits(self, c: int) -> SlotError:
        return SlotError(
            f"{self._chunks[c].label}: no microbatch waits for its weight gradients. Run each "
            "once, after the backward of its microbatch, inside the step."
        )


def _splits(chunk: Chunk) -> bool:
    return isinstance(chunk.program, Split)


class _EagerStep:
    """The microbatches that wait in an eager step.

    Attributes:
        waiting: For each chunk, the microbatches whose backward has begun or that have none,
            oldest first.
    """

    def __init__(self, chunks: Sequence[Chunk], delayed: Sequence[DelayedModules | None]) -> None:
        self._delayed = delayed
        self.waiting = tuple(deque[int]() for _ in chunks)
        self._chunks = chunks
        self._num_forwards = [0] * len(chunks)

    def watch(self, c: int, result: Any) -> None:
        tensors = distinct_tensors(flatten(result)[0])
        outputs = [t for t in tensors if t.requires_grad and not t.is_leaf]
        begin = _Begin(self.waiting[c], self._num_forwards[c])
        self._num_forwards[c] += 1
        if not outputs:
            begin(None)  # there is no backward, but schedules run W all the same
        for tensor in outputs:
            tensor.register_hook(begin)

    def run(self, c: int) -> None:
        self.waiting[c].popleft()
        delayed = self._delayed[c]
        assert delayed is not None
        delayed.run(())

    def end(self) -> None:
        left = [
            f"microbatch {microbatch} of {chunk.label}"
            for chunk, waiting in zip(self._chunks, self.waiting, strict=True)
            for microbatch in waiting
        ]
        if left:
            raise SlotError(
                f"The step ended, but {len(left)} weight gradients were not run "
                f"({', '.join(left)}). Run those of every microbatch before the step ends."
            )


class _Begin:
    """A hook that records once that the backward of a microbatch has begun."""

    def __init__(self, waiting: deque[int], microbatch: int) -> None:
        self._waiting = waiting
        self._microbatch = microbatch
        self._has_begun = False

    def __call__(self, _grad: torch.Tensor | None) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._waiting.append(self._microbatch)

"""`WeightBackwards`: the weight halves of split backwards, run when the schedule asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.engine import ChunkGraphs
from chunkgraph.engine.observer import Observer
from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.engine.split.program import Split
from chunkgraph.engine.tree import distinct_tensors, flatten
from chunkgraph.errors import SlotError
from chunkgraph.slots import SlotMachine

_NUM_EAGER = 1 << 16
"""More microbatches than are in flight in any eager step, which has no slots to run out of."""


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
        self._delayed = [DelayedModules(c.module, c.label) for c in chunks]
        self._graphs = graphs
        # An eager step runs the halves in the same order as slots do.
        self._eager = SlotMachine([_NUM_EAGER] * len(chunks), "eager step")
        self._is_eager = False
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
        if not waiting and _is_frozen(self._chunks[c]):
            return lambda: None
        if not waiting:
            raise SlotError(
                f"{self._chunks[c].label}: no microbatch waits for its weight gradient. Ask for "
                "the function after the backward of its microbatch, inside the step."
            )
        turn = waiting[-1]
        return lambda: self._run(c, turn)

    def observes(self, step: int | None) -> bool:
        """Observe eager steps."""
        return step is None and any(map(_splits, self._chunks))

    def begin_step(self, step: int | None) -> None:  # noqa: ARG002
        """Begin an eager step."""
        self._is_eager = True
        self._eager.abort_step()
        self._eager.begin_step()

    def called(self, c: int, result: Any) -> None:
        """Let the microbatch of an eager call wait, once its backward begins."""
        if not self._is_eager or not _splits(self._chunks[c]) or not torch.is_grad_enabled():
            return
        tensors = distinct_tensors(flatten(result)[0])
        outputs = [t for t in tensors if t.requires_grad and not t.is_leaf]
        if not outputs and _is_frozen(self._chunks[c]):
            return
        slot, turn = self._eager.acquire_forward(c), self._eager.latest_turn

        def begin(_: torch.Tensor | None = None) -> None:
            if hook is not None:
                hook.remove()
            self._eager.begin_backward(c, slot, turn)
            self._eager.await_last(c, slot)

        hook = register_multi_grad_hook(outputs, begin, mode="any") if outputs else None
        if not outputs:
            begin()  # there is no backward, but schedules run W all the same

    def end_step(self, *, has_failed: bool) -> None:
        """End an eager step.

        Raises:
            SlotError: Weight gradients were not run when the step ended.
        """
        self._is_eager = False
        if not has_failed and any(map(self._eager.waiting, range(len(self._chunks)))):
            self._eager.end_step()

    def _run(self, c: int, turn: int | None) -> None:
        self._check_split(c)
        if not self._waiting(c) and _is_frozen(self._chunks[c]):
            return
        if not self._is_eager:
            self._graphs.run_waiting(c, turn)
            return
        slot = self._eager.begin_last(c, turn)
        self._delayed[c].run_eagerly(not self._eager.waiting(c))
        self._eager.release(c, slot)

    def _waiting(self, c: int) -> tuple[int, ...]:
        return self._eager.waiting(c) if self._is_eager else self._graphs.waiting(c)

    def _check_split(self, c: int) -> None:
        if not _splits(self._chunks[c]):
            raise SlotError(
                f"{self._chunks[c].label}: its backward is not split and computes the weight "
                "gradients itself. Pass Chunk.from_module(module, label, program=SPLIT) to run "
                "them separately."
            )


def _is_frozen(chunk: Chunk) -> bool:
    """Return whether a chunk has nothing to train; without input gradients it has no backward."""
    parameters = chunk.parameters if chunk.module is None else chunk.module.parameters()
    return not any(p.requires_grad for p in parameters)


def _splits(chunk: Chunk) -> bool:
    return isinstance(chunk.program, Split)

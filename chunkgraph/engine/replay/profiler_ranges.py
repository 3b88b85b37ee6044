"""Named ranges around replays, for profilers: NVTX on a GPU, and ``record_function``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.engine.replay.autograd_node import SlotRunner
from chunkgraph.engine.slot import Slot

__all__ = ["ReplayRanges"]


class ReplayRanges:
    """A `SlotRunner` that wraps the engine's own and names every replay.

    A range is called ``<chunk> forward microbatch 3``. Microbatches count from 0 in each step, in
    the order of the chunk's forwards.

    Args:
        runner: The runner that replays.
        names: The name of each chunk.
    """

    def __init__(self, runner: SlotRunner, names: Sequence[str]) -> None:
        self._runner = runner
        self._names = tuple(names)
        self._next = [0] * len(self._names)
        self._microbatch: dict[tuple[int, int], int] = {}

    def begin_step(self) -> None:
        """Count microbatches from 0 again."""
        self._next = [0] * len(self._names)

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Replay the slot's forward inside its range."""
        microbatch = self._next[slot.chunk]
        self._next[slot.chunk] += 1
        self._microbatch[slot.chunk, slot.index] = microbatch
        with _named(f"{self._names[slot.chunk]} forward microbatch {microbatch}"):
            self._runner.replay_forward(slot, tensors)

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> None:
        """Replay the slot's backward inside its range."""
        microbatch = self._microbatch.get((slot.chunk, slot.index), 0)
        with _named(f"{self._names[slot.chunk]} backward microbatch {microbatch}"):
            self._runner.replay_backward(slot, turn, grads)

    def replay_weight(self, slot: Slot) -> None:
        """Replay the weight half of the slot's backward inside its range."""
        microbatch = self._microbatch.get((slot.chunk, slot.index), 0)
        with _named(f"{self._names[slot.chunk]} weight gradient microbatch {microbatch}"):
            self._runner.replay_weight(slot)


@contextmanager
def _named(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        if not torch.cuda.is_initialized():
            yield
            return
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

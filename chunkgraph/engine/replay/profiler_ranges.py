"""Named ranges around replays, for profilers: NVTX on a GPU, and ``record_function``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch

from chunkgraph.engine.observer import Action, Observer
from chunkgraph.engine.slot import Slot

__all__ = ["ReplayRanges"]

_NAMES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}


class ReplayRanges(Observer):
    """Name every replay, as ``<chunk> forward microbatch 3``.

    Microbatches count from 0 in each step, in the order of the chunk's forwards.

    Args:
        names: The name of each chunk.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._open = ExitStack()
        self.begin_step(0)

    def begin_step(self, step: int) -> None:  # noqa: ARG002
        """Count microbatches from 0 again."""
        self._next = [0] * len(self._names)
        self._microbatch: dict[tuple[int, int], int] = {}

    def before(self, action: Action, slot: Slot, tensors: object) -> None:  # noqa: ARG002
        """Begin the range of a replay."""
        c = slot.chunk
        if action == "F":
            self._microbatch[c, slot.index] = self._next[c]
            self._next[c] += 1
        microbatch = self._microbatch.get((c, slot.index), 0)
        name = f"{self._names[c]} {_NAMES[action]} microbatch {microbatch}"
        self._open.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_initialized():
            self._open.enter_context(torch.cuda.nvtx.range(name))

    def after(self, action: Action, slot: Slot) -> None:  # noqa: ARG002
        """End the range."""
        self._open.close()

    def end_step(self) -> None:
        """End a range whose replay failed."""
        self._open.close()

"""The stash's counts on the host, without waiting while the device works."""

from __future__ import annotations

import torch

from chunkgraph.memory.stash.arena import Arena, StashStatus

__all__ = ["StashReadout"]


class StashReadout:
    """Copies an arena's counts behind the kernels of a step.

    Args:
        arena: whose counts.
    """

    def __init__(self, arena: Arena) -> None:
        self._state = arena.state
        self._host = torch.zeros_like(arena.state, device="cpu", pin_memory=arena.state.is_cuda)
        self._event = torch.cuda.Event() if arena.state.is_cuda else None

    def send(self) -> None:
        """Send the counts on their way, on the current stream."""
        self._host.copy_(self._state, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> StashStatus:
        """What was sent last; waits until it has arrived, for nothing behind it."""
        if self._event is not None:
            self._event.synchronize()
        return StashStatus(*self._host.tolist())

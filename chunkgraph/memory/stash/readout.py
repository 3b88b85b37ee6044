"""Copy the stash's counts to the host without stalling the device."""

from __future__ import annotations

import torch

from chunkgraph.memory.stash.arena import Arena, StashStatus

__all__ = ["StashReadout", "StepReadout"]


class StashReadout:
    """Copy an arena's counts to the host after the kernels queued so far.

    Args:
        arena: The arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._state = arena.state
        self._host = torch.zeros_like(arena.state, device="cpu", pin_memory=arena.state.is_cuda)
        self._event = torch.cuda.Event() if arena.state.is_cuda else None

    def send(self) -> None:
        """Start copying the counts on the current stream."""
        self._host.copy_(self._state, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> StashStatus:
        """Wait for the last copy, not for work after it, and return the counts."""
        if self._event is not None:
            self._event.synchronize()
        return StashStatus(*self._host.tolist())


class StepReadout:
    """Read an arena's counts of one step: after its last forward, and after its end.

    Args:
        arena: The arena.
    """

    def __init__(self, arena: Arena) -> None:
        self._forwards, self._end = StashReadout(arena), StashReadout(arena)
        self.begin()

    def begin(self) -> None:
        """Begin another step; discard the counts of the previous one."""
        self._is_sent = self._has_ended = False
        self._status: StashStatus | None = None

    def end_forwards(self) -> None:
        """Start copying the counts after the last forward."""
        self._forwards.send()
        self._is_sent = True

    def resume_forwards(self) -> None:
        """Undo `end_forwards`: another forward follows."""
        self._is_sent = False

    def end(self) -> None:
        """Start copying the counts after the step, and those of the forwards if not yet done."""
        if not self._is_sent:
            self.end_forwards()
        self._end.send()
        self._has_ended = True

    def status(self) -> StashStatus:
        """Wait for the last forward, not for the backwards, and return the counts after it."""
        self._status = self._forwards.wait()
        return self._status

    def num_short_late(self) -> int:
        """Wait for the step's end; return how many tensors found no page after `status`."""
        if self._status is None or not self._has_ended:
            return 0
        return self._end.wait().num_short - self._status.num_short

    def num_pages_left(self) -> int:
        """Wait for the step's end; return how many pages were not freed."""
        return self._end.wait().num_required_pages if self._has_ended else 0

"""The stash's counts on the host, without waiting while the device works."""

from __future__ import annotations

import torch

from chunkgraph.memory.stash.arena import Arena, StashStatus

__all__ = ["StashReadout", "StepReadout"]


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


class StepReadout:
    """An arena's counts of one step: behind its last forward, and behind its end.

    Args:
        arena: whose counts.
    """

    def __init__(self, arena: Arena) -> None:
        self._forwards, self._end = StashReadout(arena), StashReadout(arena)
        self.begin()

    def begin(self) -> None:
        """Another step begins, of which nothing is known."""
        self._is_sent = self._has_ended = False
        self._told: StashStatus | None = None

    def end_forwards(self) -> None:
        """After the last forward: send the counts on their way."""
        self._forwards.send()
        self._is_sent = True

    def resume_forwards(self) -> None:
        """There was one more."""
        self._is_sent = False

    def end(self) -> None:
        """After the step: send them once more; what forwards left too, if that was not known."""
        if not self._is_sent:
            self.end_forwards()
        self._end.send()
        self._has_ended = True

    def status(self) -> StashStatus:
        """The counts behind the last forward; waits for that, not for the backwards behind it."""
        self._told = self._forwards.wait()
        return self._told

    def num_short_late(self) -> int:
        """Tensors that found no page behind what `status` told; waits for the step's end."""
        if self._told is None or not self._has_ended:
            return 0
        return self._end.wait().num_short - self._told.num_short

    def num_pages_left(self) -> int:
        """Pages that were not given back; waits for the step's end."""
        return self._end.wait().num_wanted_pages if self._has_ended else 0

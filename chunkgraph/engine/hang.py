"""Find the replay that does not end: NCCL's watchdog does not see the collectives of a graph."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.engine.agreement import job_timeout
from chunkgraph.engine.chunk import ReplayAction
from chunkgraph.engine.observer import NamedReplays
from chunkgraph.engine.slot import Slot

_NUM_EVENTS = 4096
_PATIENCE_S = 10.0
"""Seconds without the end of any replay. Queues of the device may be longer than the timeout."""


class HangWatch(NamedReplays):
    """Look whether replays end, and end the process with the name of the first that does not.

    The host records an event behind each replay. A thread reads events only if the host has
    launched no replay for longer than the timeout. Then none may have ended for a while, either.

    Args:
        names: The name of each chunk.
        timeout_s: Seconds after which a replay hangs.
        new_event: Returns a new event, as ``torch.cuda.Event`` is.
        end: Ends the process with a message; returns only in tests.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float,
        new_event: Callable[[], Any] = torch.cuda.Event,
        end: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(names)
        self._new_event = new_event
        # The last replays, in a ring.
        self._events: list[Any] = []
        self._launched: list[tuple[ReplayAction, int, int, int]] = []
        self._num_launched = 0
        self.last_launch = 0.0
        arguments = weakref.ref(self), timeout_s, end or _end
        threading.Thread(target=_watch, args=arguments, name="hang watch", daemon=True).start()

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Record the event of a replay."""
        place = self._num_launched % _NUM_EVENTS
        if place == len(self._events):
            self._events.append(self._new_event())
            self._launched.append((action, 0, 0, 0))
        self._events[place].record()
        self._launched[place] = action, slot.chunk, slot.index, self.microbatch(slot)
        self._num_launched += 1
        self.last_launch = time.monotonic()

    def first_pending(self) -> tuple[int, str] | None:
        """Return number and name of the first replay that has not ended.

        None if all have, or if earlier ones have left the ring and may not have ended either.
        """
        oldest = max(0, self._num_launched - _NUM_EVENTS)
        for number in range(oldest, self._num_launched):
            if not self._events[number % _NUM_EVENTS].query():
                action, c, index, microbatch = self._launched[number % _NUM_EVENTS]
                name = f"{self.name(action, c, microbatch)} (slot {index})"
                return (number, name) if number > oldest or not oldest else None
        return None


def hang_watches(device: torch.device, names: Sequence[str]) -> list[HangWatch]:
    """Return the watch of this rank's replays, if other ranks can let them hang."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    timeout = job_timeout()
    return [] if timeout is None else [HangWatch(names, timeout.total_seconds())]


def _watch(reference: weakref.ref[HangWatch], timeout_s: float, end: Callable[[str], None]) -> None:
    number, since = -1, 0.0
    while True:
        time.sleep(min(timeout_s / 10, 2.0))
        watch, now = reference(), time.monotonic()
        if watch is None:
            return
        pending = None
        if now - watch.last_launch > timeout_s:
            with contextlib.suppress(RuntimeError):  # of the device, which the training raises, too
                pending = watch.first_pending()
        if pending is None or pending[0] != number:
            number, since = pending[0] if pending else -1, now
        elif now - since > _PATIENCE_S:
            end(
                f"the replay of {pending[1]} did not end within {timeout_s:g} s. A collective in "
                "its graph waits for a rank that stopped, failed or replays something else.\n"
                "  To do: look for the first message of another rank, and for a rank that is "
                "stopped or swaps. If the work needs longer, raise the job's timeout."
            )
            return
        del watch


def _end(message: str) -> None:
    """Print the message and abort, as NCCL's watchdog does: the main thread may wait forever."""
    sys.stderr.write(f"error: rank {dist.get_rank()}: {message}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)

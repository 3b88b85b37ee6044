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

__all__ = ["HangWatch", "hang_watches"]


class HangWatch(NamedReplays):
    """Look whether replays end, and end the process with the name of the first that does not.

    The host records an event behind each replay. A thread reads only events of replays that were
    launched longer ago than the timeout.

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
        # By action, chunk and index of the slot.
        self._events: dict[tuple[ReplayAction, int, int], Any] = {}
        self._launched: dict[tuple[ReplayAction, int, int], tuple[float, int]] = {}
        arguments = weakref.ref(self), timeout_s, end or _end
        threading.Thread(target=_watch, args=arguments, name="hang watch", daemon=True).start()

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Record the event of a replay."""
        key = action, slot.chunk, slot.index
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = self._new_event()
        event.record()
        self._launched[key] = time.monotonic(), self.microbatch(slot)

    def overdue(self, before: float) -> str:
        """Return the name of the first replay launched before a time that has not ended, or ""."""
        for key, (launched, microbatch) in sorted(self._launched.items(), key=lambda i: i[1][0]):
            if launched >= before:
                break
            if not self._events[key].query():
                action, c, index = key
                return f"{self.name(action, c, microbatch)} (slot {index})"
            self._launched.pop(key, None)
        return ""


def hang_watches(device: torch.device, names: Sequence[str]) -> list[HangWatch]:
    """Return the watch of this rank's replays, if other ranks can let them hang."""
    if device.type != "cuda" or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    timeout = job_timeout()
    return [] if timeout is None else [HangWatch(names, timeout.total_seconds())]


def _watch(reference: weakref.ref[HangWatch], timeout_s: float, end: Callable[[str], None]) -> None:
    while True:
        time.sleep(min(timeout_s / 10, 5.0))
        watch = reference()
        if watch is None:
            return
        with contextlib.suppress(RuntimeError):  # of the device, which the training raises, too
            if name := watch.overdue(time.monotonic() - timeout_s):
                end(
                    f"the replay of {name} did not end within {timeout_s:g} s. A collective in its "
                    "graph waits for a rank that stopped, failed or replays something else.\n"
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

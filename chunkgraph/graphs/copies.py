"""Copies between a device and its host on streams of their own.

A *mark* is a point that later work can wait for: all that a stream had been given until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
Moves = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source, which are bytes."""


class Copier:
    """Copies in both directions at once; those of one direction run one after the other.

    Those of the CPU run as late as they may, when somebody waits for them. So a missing wait gives
    wrong numbers, as it does with a slow link.
    """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of the host that the device copies from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self) -> Mark:
        """Return a mark of all that the current stream has to do."""
        return None

    def copy(
        self,
        moves: Moves,
        after: Sequence[Mark],
        *,
        to_host: bool,
        dead: Sequence[torch.Tensor] = (),
    ) -> Mark:
        """Launch copies, and return their mark.

        Args:
            moves: The copies; their memory stays in use until the mark.
            after: Marks that they wait for.
            to_host: The direction.
            dead: Memory whose contents nobody needs afterwards; on the CPU, it is filled with 0xFF.
        """
        del to_host
        left = [moves]

        def run() -> None:
            for mark in after if left else ():
                self.wait(mark)
            for target, source in left.pop() if left else ():
                target.copy_(source)
                if any(source is memory for memory in dead):
                    source.fill_(0xFF)

        return run

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for a mark; the host goes on."""
        if mark is not None:
            mark()


class CudaCopier(Copier):
    """Copies of a CUDA device: a stream and a copy engine for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory: registered, since torch's own allocator takes a power of two."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return memory

    def mark(self) -> Mark:
        """See `Copier`."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(
        self,
        moves: Moves,
        after: Sequence[Mark],
        *,
        to_host: bool,
        dead: Sequence[torch.Tensor] = (),
    ) -> Mark:
        """See `Copier`."""
        del dead
        stream = self._streams[to_host]
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for target, source in moves:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """See `Copier`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

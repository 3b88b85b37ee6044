"""Copies between a device and its host on streams of their own.

A *mark* is a point that later work can wait for: all that a stream had been given until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

Mark = Any
Parts = Sequence[torch.Tensor]
"""Memory of the device, as bytes."""


class Copier:
    """Copies in both directions at once; those of one direction run one after the other.

    Those of the CPU run as late as they may, when somebody waits for them. So a missing wait gives
    wrong numbers, as it does with a slow link. What has moved to the host is filled with 0xFF.
    """

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of the host that the device copies from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def mark(self) -> Mark:
        """Return a mark of all that the current stream has to do."""
        return None

    def copy(
        self, parts: Parts, memory: torch.Tensor, after: Sequence[Mark], *, to_host: bool
    ) -> Mark:
        """Launch copies between parts and memory of the host, where they follow each other.

        Args:
            parts: The parts; in use until the mark that is returned.
            memory: Memory of the host, for all of them or larger; in use until then, too.
            after: Marks that the copies wait for.
            to_host: The direction.
        """

        @cache
        def run() -> None:
            for mark in after:
                self.wait(mark)
            self._run(parts, memory, to_host=to_host)
            for part in parts if to_host else ():
                part.fill_(0xFF)

        return run

    def wait(self, mark: Mark) -> None:
        """Let the current stream wait for a mark; the host goes on."""
        if mark is not None:
            mark()

    @staticmethod
    def _run(parts: Parts, memory: torch.Tensor, *, to_host: bool) -> None:
        sizes = [part.numel() for part in parts]
        for part, place in zip(parts, memory[: sum(sizes)].split(sizes), strict=True):
            target, source = (place, part) if to_host else (part, place)
            target.copy_(source, non_blocking=True)


class CudaCopier(Copier):
    """Copies of a CUDA device: a stream and a copy engine for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return pinned memory: registered, since torch's own allocator takes a power of two."""
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        if num_bytes:
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
            weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return memory

    def mark(self) -> Mark:
        """See `Copier`."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(
        self, parts: Parts, memory: torch.Tensor, after: Sequence[Mark], *, to_host: bool
    ) -> Mark:
        """See `Copier`."""
        stream = self._streams[to_host]
        with torch.cuda.stream(stream):
            for mark in after:
                self.wait(mark)
            self._run(parts, memory, to_host=to_host)
        return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """See `Copier`."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

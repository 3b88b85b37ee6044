"""Measure on the device, in eager steps, how many pages forwards need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

__all__ = ["PageMeter", "most_at_once"]


class PageMeter:
    """Measure the most pages that one forward of each chunk needs.

    Args:
        num_chunks: Number of chunks of the rank.
        device: Device of the counters.

    Attributes:
        full_bytes: For each chunk, the bytes that its forward would keep for all rows, in use or
            not.
    """

    def __init__(self, num_chunks: int, device: torch.device) -> None:
        self.full_bytes = [0] * num_chunks
        self._most = [0] * num_chunks
        self._now = torch.zeros(1, dtype=torch.int64, device=device)
        self._peaks = torch.zeros(num_chunks, dtype=torch.int64, device=device)
        self._full = self._limit = 0
        self._chunk: int | None = None
        self._was_used = False

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        """Enclose one forward of a chunk."""
        self._chunk, self._full, self._limit = chunk, 0, 0
        self._now.zero_()
        try:
            yield
        finally:
            self._chunk = None
        peak = self._peaks[chunk : chunk + 1]
        peak.copy_(torch.maximum(peak, self._now))
        self.full_bytes[chunk] = max(self.full_bytes[chunk], self._full)
        self._most[chunk] = max(self._most[chunk], self._limit)
        self._was_used = True

    @property
    def was_used(self) -> bool:
        """Return whether a forward was measured."""
        return self._was_used

    def add(self, rows: RowsInUse, layout: RowLayout) -> None:
        """Count a tensor that would be stashed."""
        if self._chunk is None:
            return
        pages = (rows.total + (layout.rows_per_page - 1)) // layout.rows_per_page
        self._now.add_(pages)
        self._full += layout.num_rows * layout.row_bytes
        self._limit += layout.max_pages

    def pages_for(
        self, num_slots: Sequence[int], headroom: float, most_in_flight: int | None = None
    ) -> int:
        """Return the pages for all microbatches in flight, each with the measured maximum.

        Waits for the device. The result is limited to `most_pages`.

        Args:
            num_slots: Number of slots of each chunk.
            headroom: Factor for forwards that need more.
            most_in_flight: Maximum number of microbatches in flight in all chunks together; None
                for the number of slots.
        """
        required = most_at_once(num_slots, self._peaks.tolist(), most_in_flight)
        return min(math.ceil(required * headroom), self.most_pages(num_slots, most_in_flight))

    def most_pages(self, num_slots: Sequence[int], most_in_flight: int | None = None) -> int:
        """Return the pages for all microbatches in flight with all rows in use.

        Args:
            num_slots: Number of slots of each chunk.
            most_in_flight: See `pages_for`.

        Returns:
            The number of pages; 0 if no forward was measured.
        """
        return most_at_once(num_slots, self._most, most_in_flight)


def most_at_once(
    num_slots: Sequence[int], each: Sequence[int], most_in_flight: int | None = None
) -> int:
    """Return the most that slots hold together if a slot of chunk ``c`` holds ``each[c]``."""
    left = sum(num_slots) if most_in_flight is None else most_in_flight
    total = 0
    for amount, count in sorted(zip(each, num_slots, strict=True), reverse=True):
        total += amount * min(count, left)
        left -= min(count, left)
    return total

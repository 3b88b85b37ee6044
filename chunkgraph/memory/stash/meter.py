"""How many pages forwards need, measured on the device in eager steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

__all__ = ["PageMeter", "most_at_once"]


class PageMeter:
    """The most pages that one forward of each chunk took.

    Args:
        num_chunks: of the rank.
        device: where it counts.

    Attributes:
        full_bytes: for each chunk, what its forward would keep of all rows, in use or not.
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
        """Around one forward of a chunk."""
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
        """Whether a forward was measured."""
        return self._was_used

    def add(self, rows: RowsInUse, layout: RowLayout) -> None:
        """One tensor that would be stashed."""
        if self._chunk is None:
            return
        pages = (rows.total + (layout.rows_per_page - 1)) // layout.rows_per_page
        self._now.add_(pages)
        self._full += layout.num_rows * layout.row_bytes
        self._limit += layout.max_pages

    def pages_for(
        self, num_slots: Sequence[int], headroom: float, most_in_flight: int | None = None
    ) -> int:
        """Pages for all that is in flight at once, each holding the most that was measured.

        Waits for the device.

        Args:
            num_slots: of each chunk.
            headroom: factor for forwards that take more; never more than all rows in use.
            most_in_flight: microbatches of all chunks together; None: as many as slots.
        """
        wanted = most_at_once(num_slots, self._peaks.tolist(), most_in_flight)
        return min(math.ceil(wanted * headroom), self.most_pages(num_slots, most_in_flight))

    def most_pages(self, num_slots: Sequence[int], most_in_flight: int | None = None) -> int:
        """Pages for all that is in flight at once, all rows in use; 0 if none was measured.

        Args:
            num_slots: of each chunk.
            most_in_flight: as for `pages_for`.
        """
        return most_at_once(num_slots, self._most, most_in_flight)


def most_at_once(
    num_slots: Sequence[int], each: Sequence[int], most_in_flight: int | None = None
) -> int:
    """The most that slots hold together, where a slot of chunk ``c`` holds ``each[c]``."""
    left = sum(num_slots) if most_in_flight is None else most_in_flight
    total = 0
    for amount, count in sorted(zip(each, num_slots, strict=True), reverse=True):
        total += amount * min(count, left)
        left -= min(count, left)
    return total

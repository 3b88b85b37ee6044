"""How many pages forwards need, measured on the device in eager steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

__all__ = ["PageMeter"]


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

    def pages_for(self, num_slots: Sequence[int], headroom: float) -> int:
        """Pages for all slots in flight at once, each holding the most that was measured.

        Waits for the device.

        Args:
            num_slots: of each chunk.
            headroom: factor for forwards that take more; never more than all rows in use.
        """
        peaks = self._peaks.tolist()
        wanted = sum(n * peak for n, peak in zip(num_slots, peaks, strict=True))
        most = sum(n * limit for n, limit in zip(num_slots, self._most, strict=True))
        return min(math.ceil(wanted * headroom), most)

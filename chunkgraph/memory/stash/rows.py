"""Which rows of a tensor are in use, told by a tensor that stays on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RowLayout", "RowsInUse"]


@dataclass(frozen=True)
class RowsInUse:
    """The rows of a tensor that hold something, wherever they are among the others.

    Attributes:
        places: for each row its place among those in use, or -1; shape [num_rows], int32, on the
            device.
        total: how many are in use, shape [1], int64, on the device.
    """

    places: torch.Tensor
    total: torch.Tensor

    @staticmethod
    def of(in_use: torch.Tensor) -> RowsInUse:
        """The rows where ``in_use``, of shape [num_rows] and type bool, is true."""
        ends = in_use.cumsum(0, dtype=torch.int32)
        return RowsInUse((ends * in_use).sub_(1), ends[-1:].to(torch.int64))

    @staticmethod
    def first(count: torch.Tensor, num_rows: int) -> RowsInUse:
        """The first ``count`` (shape [1], any integer type) of ``num_rows`` rows."""
        places = torch.arange(num_rows, dtype=torch.int32, device=count.device)
        places.masked_fill_(places >= count, -1)
        return RowsInUse(places, count.clamp(max=num_rows).to(torch.int64))

    @property
    def num_rows(self) -> int:
        """Rows, in use or not."""
        return self.places.shape[0]

    def part(self, first: int, num_rows: int) -> RowsInUse:
        """The rows ``[first, first + num_rows)`` as a tensor of their own."""
        if first == 0 and num_rows == self.num_rows:
            return self
        return RowsInUse.of(self.places[first : first + num_rows] >= 0)


@dataclass(frozen=True)
class RowLayout:
    """How the rows of one tensor lie in pages.

    Attributes:
        num_rows: most rows there can be.
        row_bytes: of each.
        page_bytes: of a page; at least one row.
    """

    num_rows: int
    row_bytes: int
    page_bytes: int

    @property
    def rows_per_page(self) -> int:
        """Whole rows in a page; what is left of the page stays empty."""
        return self.page_bytes // self.row_bytes

    @property
    def max_pages(self) -> int:
        """Pages of all rows."""
        return -(-self.num_rows // self.rows_per_page)

    @property
    def unit(self) -> torch.dtype:
        """The widest integer type that a row is made of: copies of integers change no bit."""
        for dtype in (torch.int64, torch.int32, torch.int16):
            if self.row_bytes % dtype.itemsize == 0:
                return dtype
        return torch.int8

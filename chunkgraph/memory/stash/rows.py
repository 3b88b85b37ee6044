"""The rows in use of a tensor, described by tensors on the device, and their layout in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowsInUse:
    """The rows of a tensor that are in use, at arbitrary positions.

    Attributes:
        places: Index of each row among the rows in use, or -1; int32 [num_rows] on the device.
        total: Number of rows in use; int64 [1] on the device.
    """

    places: torch.Tensor
    total: torch.Tensor

    @staticmethod
    def of(in_use: torch.Tensor) -> RowsInUse:
        """Return the rows for which ``in_use``, bool [num_rows], is true."""
        ends = in_use.cumsum(0, dtype=torch.int32)
        return RowsInUse((ends * in_use).sub_(1), ends[-1:].to(torch.int64))

    @staticmethod
    def first(count: torch.Tensor, num_rows: int) -> RowsInUse:
        """Return the first ``count`` (shape [1], any integer type) of ``num_rows`` rows."""
        places = torch.arange(num_rows, dtype=torch.int32, device=count.device)
        places.masked_fill_(places >= count, -1)
        return RowsInUse(places, count.clamp(max=num_rows).to(torch.int64))

    @property
    def num_rows(self) -> int:
        """Return the number of rows, in use or not."""
        return self.places.shape[0]

    def part(self, first: int, num_rows: int) -> RowsInUse:
        """Return the rows in use of a tensor that has only rows ``[first, first + num_rows)``."""
        if first == 0 and num_rows == self.num_rows:
            return self
        return RowsInUse.of(self.places[first : first + num_rows] >= 0)


@dataclass(frozen=True)
class RowLayout:
    """The layout of one tensor's rows in pages.

    Attributes:
        num_rows: Number of rows, in use or not.
        row_bytes: Bytes of a row.
        page_bytes: Bytes of a page; at least one row.
    """

    num_rows: int
    row_bytes: int
    page_bytes: int

    @staticmethod
    def of(tensor: torch.Tensor, page_bytes: int) -> RowLayout:
        """Return the layout of the rows (first dimension) of ``tensor``."""
        row_bytes = tensor.numel() // tensor.shape[0] * tensor.element_size()
        return RowLayout(tensor.shape[0], row_bytes, page_bytes)

    @property
    def rows_per_page(self) -> int:
        """Return the number of whole rows in a page; the rest of the page is unused."""
        return self.page_bytes // self.row_bytes

    @property
    def max_pages(self) -> int:
        """Return the number of pages for all rows."""
        return -(-self.num_rows // self.rows_per_page)

    @property
    def unit(self) -> torch.dtype:
        """Return the widest integer type that divides a row; copies of integers keep all bits."""
        for dtype in (torch.int64, torch.int32, torch.int16):
            if self.row_bytes % dtype.itemsize == 0:
                return dtype
        return torch.int8

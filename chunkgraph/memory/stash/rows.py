"""Which rows of a tensor are in use, told by counts that stay on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RowLayout", "RowsInUse"]


@dataclass(frozen=True)
class RowsInUse:
    """The first rows of every group of equally many rows.

    An expert's input padded to a capacity is such a tensor: a group for each source of tokens, the
    tokens that came in front, padding behind. A buffer filled from the front is one group.

    Attributes:
        counts: rows in use of each group, shape [num_groups], int64, on the device.
        offsets: rows in use of the groups before it, likewise.
        total: of all groups, shape [1].
        num_rows: of the whole tensor, in use or not.
    """

    counts: torch.Tensor
    offsets: torch.Tensor
    total: torch.Tensor
    num_rows: int

    @staticmethod
    def of(counts: torch.Tensor, num_rows: int) -> RowsInUse:
        """The rows that ``counts`` tells; larger ones than a group has rows mean all of them.

        Args:
            counts: shape [num_groups], any integer type.
            num_rows: of the tensor, a multiple of the number of groups.
        """
        num_groups = counts.shape[0]
        assert num_groups, "a tensor has at least one group of rows"
        assert num_rows % num_groups == 0, "groups have equally many rows"
        counts = counts.detach().to(torch.int64).clamp(0, num_rows // num_groups)
        ends = counts.cumsum(0)
        return RowsInUse(counts, ends - counts, ends[-1:], num_rows)

    @property
    def num_groups(self) -> int:
        """Groups of rows."""
        return self.counts.shape[0]

    @property
    def group_rows(self) -> int:
        """Rows of each group."""
        return self.num_rows // self.num_groups

    def part(self, first: int, num_rows: int) -> RowsInUse | None:
        """The rows ``[first, first + num_rows)`` as a tensor of their own.

        Returns:
            None where they are not whole groups.
        """
        if first == 0 and num_rows == self.num_rows:
            return self
        size = self.group_rows
        if not num_rows or first % size or num_rows % size or first + num_rows > self.num_rows:
            return None
        return RowsInUse.of(self.counts[first // size : (first + num_rows) // size], num_rows)

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row whether it is in use, and its place among those that are.

        Returns:
            A bool and an int64 tensor, shape [num_rows]; the places of unused rows mean nothing.
        """
        number = torch.arange(self.group_rows, device=self.counts.device)
        in_use = number < self.counts.unsqueeze(1)
        places = self.offsets.unsqueeze(1) + number
        return in_use.reshape(-1), places.reshape(-1)


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

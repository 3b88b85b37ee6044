"""Memory addresses: sets of them as half-open ranges of bytes, and tensors on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch


class AddressRange(NamedTuple):
    """Bytes ``start <= address < end``."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start:#x}, {self.end:#x})"


class AddressRanges(tuple[AddressRange, ...]):
    """A set of addresses as sorted ranges; touching and overlapping ranges are merged.

    Args:
        ranges: Pairs of start and end (exclusive) in bytes, in any order; empty ranges are dropped.
    """

    __slots__ = ()

    def __new__(cls, ranges: Iterable[tuple[int, int]] = ()) -> Self:
        """Sort and merge the ranges."""
        merged: list[AddressRange] = []
        for start, end in sorted(ranges):
            if end <= start:
                continue
            if merged and start <= merged[-1].end:
                merged[-1] = AddressRange(merged[-1].start, max(end, merged[-1].end))
            else:
                merged.append(AddressRange(start, end))
        return super().__new__(cls, merged)

    def __or__(self, other: AddressRanges) -> AddressRanges:
        return AddressRanges([*self, *other])

    def __and__(self, other: AddressRanges) -> AddressRanges:
        """Return the addresses in both sets, in one pass over the two sorted tuples."""
        common: list[tuple[int, int]] = []
        left, right = iter(self), iter(other)
        a, b = next(left, None), next(right, None)
        while a is not None and b is not None:
            start, end = max(a.start, b.start), min(a.end, b.end)
            if start < end:
                common.append((start, end))
            if a.end <= b.end:
                a = next(left, None)
            else:
                b = next(right, None)
        return AddressRanges(common)

    def __sub__(self, other: AddressRanges) -> AddressRanges:
        """Return the addresses in this set only."""
        remaining: list[tuple[int, int]] = []
        for area in self:
            start = area.start
            for removed in AddressRanges([area]) & other:
                remaining.append((start, removed.start))
                start = removed.end
            remaining.append((start, area.end))
        return AddressRanges(remaining)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes in the set."""
        return sum(r.end - r.start for r in self)


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at ``address`` as a uint8 tensor [num_bytes] that keeps nothing alive.

    Args:
        address: Address of memory on ``device`` that must outlive the tensor.
        num_bytes: Number of bytes, at least 1.
        device: A CPU or CUDA device.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

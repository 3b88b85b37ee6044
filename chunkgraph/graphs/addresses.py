"""Memory addresses: sets of them as half-open ranges of bytes, and tensors on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["AddressRange", "AddressRanges", "tensor_at"]


@dataclass(frozen=True, order=True)
class AddressRange:
    """Bytes ``start <= address < end``."""

    start: int
    end: int

    def __str__(self) -> str:
        return f"[{self.start:#x}, {self.end:#x})"


class AddressRanges:
    """An immutable set of addresses; touching and overlapping ranges are merged.

    Args:
        ranges: Pairs of start and end (exclusive) in bytes, in any order; empty ranges are dropped.
    """

    __slots__ = ("ranges",)

    ranges: tuple[AddressRange, ...]

    def __init__(self, ranges: Iterable[tuple[int, int] | AddressRange] = ()) -> None:
        pairs = sorted((r.start, r.end) if isinstance(r, AddressRange) else r for r in ranges)
        merged: list[tuple[int, int]] = []
        for start, end in pairs:
            if end <= start:
                continue
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        self.ranges = tuple(AddressRange(start, end) for start, end in merged)

    def __iter__(self) -> Iterator[AddressRange]:
        return iter(self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AddressRanges) and self.ranges == other.ranges

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __or__(self, other: AddressRanges) -> AddressRanges:
        return AddressRanges([*self.ranges, *other.ranges])

    def __and__(self, other: AddressRanges) -> AddressRanges:
        """Return the addresses in both sets, in one pass over the two sorted tuples."""
        common: list[tuple[int, int]] = []
        left, right = iter(self.ranges), iter(other.ranges)
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
        for area in self.ranges:
            start = area.start
            for removed in AddressRanges([area]) & other:
                remaining.append((start, removed.start))
                start = removed.end
            remaining.append((start, area.end))
        return AddressRanges(remaining)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes in the set."""
        return sum(r.end - r.start for r in self.ranges)

    def __repr__(self) -> str:
        return f"AddressRanges({', '.join(map(str, self.ranges))})"


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the bytes at ``address`` as a uint8 tensor [num_bytes] that keeps nothing alive.

    Args:
        address: Address of memory on ``device`` that must outlive the tensor.
        num_bytes: Number of bytes, at least 1.
        device: A CPU or CUDA device.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

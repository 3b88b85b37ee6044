"""Sets of memory addresses as sorted, disjoint, half-open ranges of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["AddressRange", "AddressRanges"]


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
        ranges: pairs of start and end (exclusive), in bytes, in any order; empty ones are dropped.
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
        """Addresses in both sets, in one merge pass over the two sorted tuples."""
        common: list[tuple[int, int]] = []
        mine, theirs = iter(self.ranges), iter(other.ranges)
        a, b = next(mine, None), next(theirs, None)
        while a is not None and b is not None:
            start, end = max(a.start, b.start), min(a.end, b.end)
            if start < end:
                common.append((start, end))
            if a.end <= b.end:
                a = next(mine, None)
            else:
                b = next(theirs, None)
        return AddressRanges(common)

    def __sub__(self, other: AddressRanges) -> AddressRanges:
        """Addresses in this set only."""
        left: list[tuple[int, int]] = []
        for mine in self.ranges:
            start = mine.start
            for taken in AddressRanges([mine]) & other:
                left.append((start, taken.start))
                start = taken.end
            left.append((start, mine.end))
        return AddressRanges(left)

    @property
    def num_bytes(self) -> int:
        """How many bytes the set holds."""
        return sum(r.end - r.start for r in self.ranges)

    def __repr__(self) -> str:
        return f"AddressRanges({', '.join(map(str, self.ranges))})"

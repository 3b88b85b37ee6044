"""Memory addresses: sets of them as half-open ranges of bytes, and tensors on them."""

from __future__ import annotations

import ctypes
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


class _RawBytes:
    """Device bytes for `torch.as_tensor`, which makes a view and takes no ownership."""

    def __init__(self, start: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (start, False),
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """The bytes at ``address`` as a tensor (dtype uint8) that keeps nothing alive.

    Args:
        address: of memory of ``device`` that is there for as long as the tensor is used.
        num_bytes: at least 1.
        device: a CPU or a CUDA device.
    """
    if device.type == "cuda":
        return torch.as_tensor(_RawBytes(address, num_bytes), device=device)
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)

"""Memory addresses: sets of them as half-open ranges of bytes, tensors on them, and pools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, Self

import torch

from chunkgraph.graphs.allocations import Allocation


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


class Pool(Protocol):
    """Memory that captured graphs allocate from. Freed blocks serve later captures of this pool."""

    label: str
    device: torch.device
    is_asleep: bool = False
    """Whether its memory was given back."""

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the pool holds, in use or free."""
        return self.reserved().num_bytes

    @abstractmethod
    def reserve(self, num_bytes: int, allocations: Sequence[Sequence[Allocation]] = ()) -> None:
        """Allocate about ``num_bytes`` from the device, in one piece that captures divide.

        Captures that allocate many small pieces waste memory at the end of each piece. This is a
        hint: if ``num_bytes`` is the peak of the captured work, the pool becomes no larger than
        necessary. With its free blocks it may need less for the ``allocations`` of each work.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate at least 1 byte, outside of captures, until its last tensor is freed."""

    @abstractmethod
    def serving_this_thread(self) -> AbstractContextManager[None]:
        """Serve this thread's allocations on the device, of eager work too."""

    @abstractmethod
    def sleep(self) -> None:
        """Give the memory back to the device, which has finished all work; keep the addresses.

        Only for pools of a backend with ``can_sleep``. `reserved` stays as it is.
        """

    @abstractmethod
    def wake(self) -> None:
        """Get memory for the same addresses, with undefined contents.

        Raises:
            torch.OutOfMemoryError: Too little is free; the pool still sleeps.
        """

    @abstractmethod
    def live(self) -> AddressRanges:
        """Return the addresses of the blocks in use."""

    @abstractmethod
    def reserved(self) -> AddressRanges:
        """Return the addresses of all memory of the pool."""

    @abstractmethod
    def relative(self, ranges: AddressRanges) -> list[tuple[int, AddressRange]] | None:
        """Return each range with its offset in the pool's memory, in ascending order.

        Its segments count as if each followed the one allocated before it. None: the order of the
        segments is unknown, as without an arena (``can_sleep``).
        """

    @abstractmethod
    def alias(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage on the pool's memory that keeps no block in use."""

    def is_alias(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a graph replays on this storage; graphs of most backends hold none."""
        del storage
        return False

    def poison(self, kept: Iterable[AddressRange] = ()) -> None:
        """Fill all but ``kept`` with 0xFF (a NaN in every floating dtype), in stream order."""
        for area in self.reserved() - AddressRanges(kept):
            tensor_at(area.start, area.end - area.start, self.device).fill_(0xFF)

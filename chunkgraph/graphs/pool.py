"""`Pool`: memory of graphs, as the engine sees it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol

import torch

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, tensor_at

__all__ = ["Pool"]


class Pool(Protocol):
    """Memory that captured graphs allocate from. Freed blocks serve later captures of this pool."""

    label: str
    device: torch.device

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the pool holds, in use or free."""
        return self.reserved().num_bytes

    @abstractmethod
    def reserve(self, num_bytes: int) -> None:
        """Allocate about ``num_bytes`` from the device, in one piece that captures divide.

        Captures that allocate many small pieces waste memory at the end of each piece. This is a
        hint: if ``num_bytes`` is the peak of the captured work, the pool becomes no larger than
        necessary.
        """

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate at least 1 byte, outside of captures, until its last tensor is freed."""

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

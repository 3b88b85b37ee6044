"""Look up tensors in the memory of pools."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from chunkgraph.graphs import Pool

__all__ = ["PoolMemory"]


class PoolMemory:
    """The memory of pools that is in use."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = tuple(pools)
        ranges = [r for pool in pools for r in pool.live()]
        self._ranges = sorted((r.start, r.end) for r in ranges)
        self._starts = [start for start, _ in self._ranges]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory and is not an alias that a graph uses."""
        try:
            storage = tensor.untyped_storage()
            if storage.device.type == "meta":  # that of a compiler's tensor has no address
                return False
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError, ValueError):  # the tensor has no storage
            return False
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._ranges[place][1]:
            return False
        return not any(pool.is_alias(storage) for pool in self._pools)

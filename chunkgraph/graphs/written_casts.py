"""Find tensors that a forward both casts and writes: a shared cast would hold old values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.graphs.location import current_location
from chunkgraph.graphs.operator_mode import OperatorMode
from chunkgraph.graphs.recording import storage_address, storages_written, tensors_in

__all__ = ["CastWatch"]


class CastWatch(OperatorMode):
    """Record which of ``tensors`` are cast, and where each is first written.

    Args:
        tensors: The tensors, which are recognized by their memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._storages = {storage_address(tensor) for tensor in tensors} - {0}
        self._cast: set[int] = set()
        self._written: dict[int, str] = {}

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        if func is torch.ops.aten._to_copy.default:
            self._cast.update(map(storage_address, tensors_in(args)))
        for tensor in storages_written(func, args, kwargs):
            storage = storage_address(tensor)
            if storage in self._storages and storage not in self._written:
                self._written[storage] = str(current_location() or "an unknown line")
        return func(*args, **kwargs)

    def place_written(self, tensor: torch.Tensor) -> str:
        """Return where ``tensor`` is first written; "" if it is not written, or not cast."""
        storage = storage_address(tensor)
        return self._written.get(storage, "") if storage in self._cast else ""

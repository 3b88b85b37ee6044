"""Record the tensors that operators read from outside of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

from chunkgraph.graphs.operator_mode import OperatorMode
from chunkgraph.graphs.recording import storage_address, storages_written, tensors_in

__all__ = ["InputWatch"]


class InputWatch(OperatorMode):
    """Record tensors that operators read or write and that none in the block has returned.

    Args:
        inputs: The record of both; a dictionary with weak keys.
        before_write: Called before an operator writes to memory from outside of the block.
        arguments: Tensors of the block itself.
    """

    def __init__(
        self,
        inputs: Any,
        before_write: Callable[[torch.UntypedStorage], None],
        arguments: Iterable[torch.Tensor],
    ) -> None:
        super().__init__()
        self._inputs = inputs
        self._before_write = before_write
        self._results: Any = WeakIdKeyDictionary()
        self._own = {0}  # the address of tensors that wrap others
        for tensor in arguments:
            self._results[tensor] = None

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        tensors = tensors_in(*args, *kwargs.values())
        for tensor in tensors:
            if tensor not in self._results:
                self._inputs[tensor] = None
        for tensor in storages_written(func, args, kwargs):
            if storage_address(tensor) not in self._own:
                self._before_write(tensor.untyped_storage())
        result = func(*args, **kwargs)
        known = {*map(storage_address, tensors)}
        for tensor in tensors_in(result):
            if tensor not in self._inputs:
                self._results[tensor] = None
            self._own |= {storage_address(tensor)} - known
        return result

"""Record the tensors that operators read from outside of a block."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

from chunkgraph.graphs.operator_mode import OperatorMode
from chunkgraph.graphs.recording import tensors_in

__all__ = ["InputWatch"]


class InputWatch(OperatorMode):
    """Record tensors that operators read and that no operator in the block has returned.

    Args:
        inputs: The record; a dictionary with weak keys.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()
        self._inputs = inputs
        self._results: Any = WeakIdKeyDictionary()

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        for tensor in tensors_in(*args, *kwargs.values()):
            if tensor not in self._results:
                self._inputs[tensor] = None
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor not in self._inputs:
                self._results[tensor] = None
        return result

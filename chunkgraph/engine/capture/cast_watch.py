"""Find what a forward casts, and whether it or a backward enters `torch.autocast` itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph.engine.autocast import Autocast, ForwardCasts, num_autocast_blocks
from chunkgraph.graphs import storage_address
from chunkgraph.graphs.operators import OperatorMode

__all__ = ["BlockWatch"]


class BlockWatch(OperatorMode):
    """Record how a forward or a backward depends on autocast.

    Enter it before modes that report lines: their search for one ends at frames of the engine.

    Args:
        inputs: the forward's static inputs, each in its own memory.
        autocast: the setting around it; None if unknown.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], autocast: Autocast | None) -> None:
        super().__init__()
        self._numbers = {storage_address(tensor): i for i, tensor in enumerate(inputs)}
        self._num_outside = int(autocast is not None and autocast.is_inside)
        self._cast: set[int] = set()
        self._has_blocks = False

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        num_blocks = num_autocast_blocks()
        self._has_blocks |= num_blocks > self._num_outside
        is_cast = func is torch.ops.aten._to_copy.default
        if is_cast and num_blocks and torch.is_autocast_cache_enabled():
            number = self._numbers.get(storage_address(args[0]))
            if number is not None:
                self._cast.add(number)
        return func(*args, **kwargs)

    def casts(self) -> ForwardCasts:
        """Return the facts recorded so far."""
        return ForwardCasts(tuple(sorted(self._cast)), self._has_blocks)

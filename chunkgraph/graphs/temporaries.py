"""Find the results of a forward that are dead when it returns, so that scratch can hold them.

An eager pass is watched operator by operator. An operator whose fresh results are all freed by the
end of the pass creates *temporaries*; all other results (saved tensors, the output, caches) are
*kept*. A capture runs the same operators in the same order and allocates temporaries from scratch.
Results that are not known to be temporary, or that bypass the dispatcher (compiled code, workspaces
of libraries), stay in the slot's pool: a mistake in this direction only costs memory. A mistake in
the other direction is detected: after the capture nothing in scratch may be alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.graphs.contract import Pool
from chunkgraph.graphs.operator_mode import OperatorMode
from chunkgraph.graphs.recording import tensors_in

__all__ = ["OperatorTrace", "ScratchRouter", "watch_operators"]


@dataclass(frozen=True)
class OperatorTrace:
    """The operators of one forward, in order.

    Attributes:
        names: Names of the operators.
        are_temporary: For each operator, whether it had fresh results that were all freed by the
            end.
    """

    names: tuple[str, ...]
    are_temporary: tuple[bool, ...]


class _Watch(OperatorMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fresh: list[list[StorageWeakRef]] = []

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        inputs = set(map(_address, tensors_in(*args, *kwargs.values())))
        out = func(*args, **kwargs)
        self.names.append(func.name())
        self.fresh.append(
            [
                StorageWeakRef(tensor.untyped_storage())
                for tensor in tensors_in(out)
                if _address(tensor) not in inputs
            ]
        )
        return out

    def trace(self) -> OperatorTrace:
        return OperatorTrace(
            tuple(self.names),
            tuple(bool(refs) and all(ref.expired() for ref in refs) for refs in self.fresh),
        )


@contextmanager
def watch_operators() -> Iterator[_Watch]:
    """Watch the operators that run inside the block.

    Yields:
        An object whose ``trace()`` returns the `OperatorTrace`. Call it while all tensors that
        outlive the forward (its result, and the tensors that autograd saved) are referenced.
    """
    with _Watch() as watch:
        yield watch


class ScratchRouter:
    """Decide for each operator of a capture whether its results go to scratch.

    Args:
        scratch: A pool in which nothing is alive at the end of a graph.
        trace: Trace of the same forward.

    Attributes:
        has_lost_track: Whether the capture ran another operator than the trace; afterwards nothing
            goes to scratch.
    """

    def __init__(self, scratch: Pool, trace: OperatorTrace) -> None:
        self.scratch = scratch
        self.has_lost_track = False
        self._trace = trace
        self._next = 0

    def goes_to_scratch(self, func: OpOverload) -> bool:
        """Return whether the results of ``func``, the next operator, are temporary."""
        if self.has_lost_track:
            return False
        index, self._next = self._next, self._next + 1
        if index >= len(self._trace.names) or self._trace.names[index] != func.name():
            self.has_lost_track = True
            return False
        return self._trace.are_temporary[index]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

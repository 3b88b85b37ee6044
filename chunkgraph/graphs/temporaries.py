"""Which results of a forward are dead when it returns, so that scratch may hold them.

An eager pass is watched operator by operator. An operator whose fresh results have all died by the
end of the pass makes *temporaries*; anything else (what the backward saved, the output, caches) is
*kept*. A capture runs the same operators in the same order, and takes memory for the temporary ones
from scratch. Whatever is not known to be temporary, or made behind the dispatcher's back (compiled
code, workspaces of libraries), stays in the slot's own pool: a mistake in that direction only
costs memory. The other direction cannot go unnoticed: after the capture nothing in scratch may be
alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from chunkgraph.graphs.contract import Pool

__all__ = ["OperatorTrace", "ScratchRouter", "watch_operators"]


@dataclass(frozen=True)
class OperatorTrace:
    """The operators of one forward, in order.

    Attributes:
        names: of the operators.
        are_temporary: for each, whether it made fresh results that were all dead at the end.
    """

    names: tuple[str, ...]
    are_temporary: tuple[bool, ...]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.fresh: list[list[StorageWeakRef]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of the forward stay compiled."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {_address(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        self.names.append(func.name())
        self.fresh.append(
            [
                StorageWeakRef(tensor.untyped_storage())
                for tensor in tree_iter(out)
                if isinstance(tensor, torch.Tensor) and _address(tensor) not in given
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
    """Watch the operators run inside.

    Yields:
        What gives the `OperatorTrace` by ``trace()``, when called while all that outlives the
        forward (its result, and through it what autograd saved) is still referenced.
    """
    with _Watch() as watch:
        yield watch


class ScratchRouter:
    """Tells a capture, operator by operator, whether to take memory from scratch.

    Args:
        scratch: a pool that is dead at the end of every graph.
        trace: of the same forward, watched before.

    Attributes:
        has_lost_track: whether the capture ran another operator than the trace says; from there on
            nothing goes to scratch.
    """

    def __init__(self, scratch: Pool, trace: OperatorTrace) -> None:
        self.scratch = scratch
        self.has_lost_track = False
        self._trace = trace
        self._next = 0

    def goes_to_scratch(self, func: OpOverload) -> bool:
        """Whether the results of this operator, the next one of the forward, are temporary."""
        if self.has_lost_track:
            return False
        at, self._next = self._next, self._next + 1
        if at >= len(self._trace.names) or self._trace.names[at] != func.name():
            self.has_lost_track = True
            return False
        return self._trace.are_temporary[at]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

"""Agreement on the host over process groups of gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Gather", "Maximum", "Share"]

_CLOSING_TIME = timedelta(seconds=2)


class Gather:
    """Gives every rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own; None for this rank alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, in the order of the group; every rank of it calls."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class Share:
    """Gives one rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own.
        source: the global rank whose value it is.
    """

    def __init__(self, group: Any, source: int) -> None:
        self._group = group
        self._source = source

    def __call__(self, value: Any) -> Any:
        """The source's value; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, self._source, self._group, torch.device("cpu"))
        return values[0]

    def close(self) -> None:
        """Give the group back."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


class Maximum:
    """An `EarlyAgree` over a process group of its own.

    Args:
        group: a gloo group of all ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: Any = None

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Ask and wait."""
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=torch.device("cpu"))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._last = work

        def wait() -> list[int]:
            work.wait()
            return [int(value) for value in tensor]

        return wait

    def close(self) -> None:
        """Give the group back; nothing can be asked any more.

        Every step asks about the next one, so that a question is open when training ends. All
        ranks asked it, unless one of them failed; then the group is left to the process's end.
        """
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        if self._last is not None:
            try:
                self._last.wait(_CLOSING_TIME)
            except RuntimeError:
                return
        dist.destroy_process_group(group)

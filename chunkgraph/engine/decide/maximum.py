"""`Maximum`: the agreement of ranks over a gloo group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Maximum"]

_CLOSING_TIME = timedelta(seconds=2)


class Maximum:
    """Compute an element-wise maximum over all ranks; implements `EarlyAgree`.

    Args:
        group: A gloo group of all ranks that this object owns.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: Any = None

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of all ranks' values; waits for the other ranks."""
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start the reduction; return a function that waits for its result."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=torch.device("cpu"))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._last = work

        def wait() -> list[int]:
            work.wait()
            return [int(value) for value in tensor]

        return wait

    def close(self) -> None:
        """Destroy the group; no further reduction can start.

        Every step starts the reduction of the next one, so one is pending when training ends. It
        completes unless a rank failed; in that case the group stays until the process ends.
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

"""Let all ranks agree on the maximum of each number, now or ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Agree", "Agreement", "Maximum", "agree_alone"]

Agree = Callable[[Sequence[int]], list[int]]
"""Element-wise maximum over all ranks of the job, on the host; the same list on every rank.

Give it a method ``start(values)`` that returns a function which waits for the answer, and ranks ask
ahead of time. Do so only if all ranks call `ChunkGraphs.step` with the same arguments, as
Megatron's schedules do: a single rank that asks again waits for the others forever.
"""


class Agreement:
    """Ask all ranks, and keep the question that was posted ahead of time.

    Args:
        agree: Element-wise maximum over the ranks.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._start: Callable[[Sequence[int]], Callable[[], list[int]]] | None
        self._start = getattr(agree, "start", None)
        self._posted: tuple[list[int], Callable[[], list[int]]] | None = None

    def now(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks of each value. All ranks forget posted questions."""
        if self._posted is not None:
            self._posted[1]()
            self._posted = None
        return self._agree(values)

    def post(self, values: list[int]) -> None:
        """Post the question of a later `answer` with the same values, if possible."""
        if self._start is not None:
            if self._posted is not None:
                self._posted[1]()
            self._posted = values, self._start(values)

    def answer(self, values: list[int]) -> list[int]:
        """Return the same as `now`, without waiting if the same question was posted before.

        Args:
            values: This rank's values; the last two are a digest and its negative. If the digests
                of the ranks differ, all ranks ask once more and take the new answer.
        """
        posted, self._posted = self._posted, None
        is_same = posted is None or posted[0] == values
        # Wait in any case: collectives of a group end in order.
        agreed = self._agree(values) if posted is None else posted[1]()
        has_one_digest = agreed[-2] == -agreed[-1]
        return agreed if is_same and has_one_digest else self._agree(values)


def agree_alone(values: Sequence[int]) -> list[int]:
    """Return the values: the agreement in a job of one process."""
    return list(values)


_CLOSING_TIME = timedelta(seconds=2)


class Maximum:
    """Compute an element-wise maximum over all ranks, now or ahead of time; see `Agree`.

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

"""Let the ranks agree on a step when it begins, or ahead of time.

A collective on the host takes 0.4 to 1 ms between two processes (measured with gloo); meanwhile a
device with an empty queue idles. So the question about the next step is posted when a step ends,
and the answer arrives long before that step begins. The answer is used if the step is of the
assumed kind; otherwise the ranks ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

from chunkgraph.engine.decide.reasons import Agree

__all__ = ["Agreement", "EarlyAgree"]


@runtime_checkable
class EarlyAgree(Protocol):
    """An `Agree` that can be asked ahead of time.

    Use it only if all ranks call `ChunkGraphs.step` with the same arguments, as Megatron's
    schedules do: a single rank that asks again waits for the others forever.
    """

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Ask and wait for the answer."""

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; return a function that waits for the answer."""


class Agreement:
    """Ask all ranks, and keep the question that was posted ahead of time.

    Args:
        agree: Element-wise maximum over the ranks.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        # Checked once: to check whether an object fits a protocol is slow.
        self._early = agree if isinstance(agree, EarlyAgree) else None
        self._posted: tuple[Hashable, list[int], Callable[[], list[int]]] | None = None

    def now(self, values: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks of each value."""
        self.forget()
        return self._agree(values)

    def post(self, kind: Hashable, values: Sequence[int]) -> None:
        """Post the question of a later ``answer`` with the same arguments, if possible."""
        self.forget()
        if self._early is not None:
            self._posted = (kind, list(values), self._early.start(values))

    def answer(
        self,
        kind: Hashable,
        values: Sequence[int],
        is_settled: Callable[[list[int]], bool] = lambda _: True,
    ) -> list[int]:
        """Return the same as ``now``, without waiting if the same question was posted before.

        Args:
            kind: Kind of the step.
            values: This rank's values.
            is_settled: Function that returns whether an answer can be used, the same on all ranks
                for one answer. If not, all ranks ask once more and take the new answer.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            agreed, is_same = self._agree(values), True
        else:
            posted_kind, posted_values, wait = posted
            agreed = wait()  # in any case: collectives of a group end in order
            is_same = posted_kind == kind and posted_values == list(values)
        return agreed if is_same and is_settled(agreed) else self._agree(values)

    def expire(self) -> None:
        """Invalidate a posted question, so that `answer` asks again.

        All ranks call this together. Without it, each rank asks again only if its own values
        change.
        """
        if self._posted is not None:
            _, values, wait = self._posted
            self._posted = (object(), values, wait)

    def forget(self) -> None:
        """Wait for the answer to a posted question and discard it."""
        if self._posted is not None:
            _, _, wait = self._posted
            self._posted = None
            wait()

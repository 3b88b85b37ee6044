"""The job's agreement on a step: asked when the step begins, or ahead of time.

A collective on the host takes its time (0.4 to 1 ms between two processes, as measured with gloo),
in which a device whose queue is empty idles. So the question of the next step is posted when a step
ends; the answer is there long before that step begins. It is used if the step turns out to be of
the kind that was assumed; else the ranks ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

from chunkgraph.engine.decide.reasons import Agree

__all__ = ["Agreement", "EarlyAgree"]


@runtime_checkable
class EarlyAgree(Protocol):
    """An `Agree` that can be asked ahead of time.

    Only for callers whose ranks all call `ChunkGraphs.step` with the same arguments, as those of
    Megatron's schedules do: a rank that asked again alone would wait for the others for ever.
    """

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Ask and wait."""

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""


class Agreement:
    """Asks all ranks, and remembers what was asked ahead of time.

    Args:
        agree: element-wise maximum over the ranks.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        # Known once: to ask whether an object fits a protocol is slow.
        self._early = agree if isinstance(agree, EarlyAgree) else None
        self._posted: tuple[Hashable, list[int], Callable[[], list[int]]] | None = None

    def now(self, values: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each value."""
        self.forget()
        return self._agree(values)

    def post(self, kind: Hashable, values: Sequence[int]) -> None:
        """Ask what ``answer`` will be asked with the same arguments, if that is possible."""
        self.forget()
        if self._early is not None:
            self._posted = (kind, list(values), self._early.start(values))

    def answer(
        self,
        kind: Hashable,
        values: Sequence[int],
        is_settled: Callable[[list[int]], bool] = lambda _: True,
    ) -> list[int]:
        """As ``now``, but without waiting where the same was posted before.

        Args:
            kind: of step.
            values: what this rank asks.
            is_settled: whether the answer can be used, the same on all ranks for one answer; if
                not, all ranks ask once more and take what they then get.
        """
        posted, self._posted = self._posted, None
        if posted is None:
            agreed, is_same = self._agree(values), True
        else:
            posted_kind, posted_values, wait = posted
            agreed = wait()  # in any case: collectives of a group end in their order
            is_same = posted_kind == kind and posted_values == list(values)
        return agreed if is_same and is_settled(agreed) else self._agree(values)

    def expire(self) -> None:
        """Ask again on all ranks: a posted question may not hold any more.

        All ranks come here together. Each for itself would ask again only if its own values change.
        """
        if self._posted is not None:
            _, values, wait = self._posted
            self._posted = (object(), values, wait)

    def forget(self) -> None:
        """Let a posted question end unused."""
        if self._posted is not None:
            _, _, wait = self._posted
            self._posted = None
            wait()

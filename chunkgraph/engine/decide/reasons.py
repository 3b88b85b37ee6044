"""Reasons why a step runs eagerly; all ranks decide together, once per step, on the host.

A rank that fell back alone, or in the middle of a step, would leave the others waiting in a
collective. So only whole steps fall back, and the ranks agree on the largest reason before the step
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, IntEnum

__all__ = [
    "NOTHING_REPLAYED",
    "NO_GRAPHS",
    "Agree",
    "EagerReason",
    "StepMode",
    "agree_alone",
    "reason_of",
]

Agree = Callable[[Sequence[int]], list[int]]
"""Element-wise maximum over all ranks of the job, on the host; the same list on every rank."""


class EagerReason(IntEnum):
    """The reason why a step runs eagerly; the largest over the ranks applies to all of them."""

    NONE = 0
    CAPTURE_WARMUP = 1
    RELEASED = 2
    MEMORY_REPLACED = 3
    SHAPES_DIFFER = 4
    PACKING_OVERFLOW = 5
    BANK_MISSING = 6
    REQUESTED = 7
    FORWARD_ONLY = 8
    CAPTURE_FAILED = 9

    @property
    def text(self) -> str:
        """Return the reason as counted and printed, for example ``capture warmup``."""
        return {
            EagerReason.NONE: "none",
            EagerReason.CAPTURE_WARMUP: "capture warmup",
            EagerReason.RELEASED: "released",
            EagerReason.MEMORY_REPLACED: "memory of the graphs was replaced",
            EagerReason.SHAPES_DIFFER: "input shapes differ",
            EagerReason.PACKING_OVERFLOW: "packing overflow",
            EagerReason.BANK_MISSING: "no graphs of a bank",
            EagerReason.REQUESTED: "requested",
            EagerReason.FORWARD_ONLY: "forward only",
            EagerReason.CAPTURE_FAILED: "capture failed",
        }[self]


NOTHING_REPLAYED = "nothing replayed"
"""The reason counted for a step that should replay, but no call asked for gradients."""


NO_GRAPHS = "no graphs of "
"""Prefix of a misfit about a bank without graphs."""


def reason_of(misfit: str) -> EagerReason:
    """Return the reason that a misfit counts as, by its text: only the text is announced."""
    if not misfit:
        return EagerReason.NONE
    is_missing = misfit.startswith(NO_GRAPHS)
    return EagerReason.BANK_MISSING if is_missing else EagerReason.PACKING_OVERFLOW


class StepMode(Enum):
    """The mode in which the callables run."""

    OUTSIDE = "outside a step"
    EAGER = "eager"
    REPLAY = "replay"


def agree_alone(values: Sequence[int]) -> list[int]:
    """Return the values: the agreement in a job of one process."""
    return list(values)

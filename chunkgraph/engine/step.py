"""What is known of a step when it begins, and how it runs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum


class EagerReason(IntEnum):
    """The reason why a step runs eagerly; the largest over the ranks applies to all of them."""

    NONE = 0
    CAPTURE_WARMUP = 1
    RELEASED = 2
    MEMORY_REPLACED = 3
    SHAPES_DIFFER = 4
    MODEL_CHANGED = 5
    PACKING_OVERFLOW = 6
    BANK_MISSING = 7
    REQUESTED = 8
    FORWARD_ONLY = 9
    CAPTURE_FAILED = 10

    @property
    def text(self) -> str:
        """Return the reason as it is counted and printed."""
        return _TEXTS.get(self, self.name.lower().replace("_", " "))


_TEXTS = {
    EagerReason.MEMORY_REPLACED: "memory of the graphs was replaced",
    EagerReason.SHAPES_DIFFER: "input shapes differ",
    EagerReason.BANK_MISSING: "no graphs of a bank",
}

NOTHING_REPLAYED = "nothing replayed"
"""The reason counted for a step that should replay, but no call asked for gradients."""

NO_GRAPHS = "no graphs of "
"""Prefix of a misfit about a bank without graphs: only the text of a misfit is announced."""

SHAPE_UNKNOWN = ("unknown",)
"""The shape key of a step that has not been seen; compared by identity."""


class StepMode(Enum):
    """The mode in which the callables run."""

    OUTSIDE = "outside a step"
    EAGER = "eager"
    REPLAY = "replay"


@dataclass(frozen=True)
class StepPlan:
    """What is known of a step's microbatches when it begins, for engines with several banks.

    Attributes:
        banks: the bank of each microbatch, in the order of the chunks' forwards; required in
            training steps if there are several banks, unless there is a misfit. Ranks with common
            collectives inside a chunk must pass the same; this is not checked.
        misfit: with ``takes_misfits``: why this rank's inputs do not fit the graphs, "" if they
            fit; None if it was announced. A misfit on any rank makes the step eager on all.
        digest: with ``takes_misfits``: a digest of the plan that all ranks follow in this step; 0
            without one. An announced digest takes precedence.
    """

    banks: Sequence[Hashable] | None = None
    misfit: str | None = None
    digest: int = 0


@dataclass(frozen=True)
class StepRequest:
    """The arguments of `ChunkGraphs.step`; all but the plan are equal on all ranks."""

    shape_key: Hashable = None
    eager: bool = False
    plan: StepPlan = StepPlan()

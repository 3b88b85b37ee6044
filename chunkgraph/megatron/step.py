"""A step of the schedule as features see it: what it holds, how it runs, what had no room in it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from chunkgraph.engine import StepMode
from chunkgraph.errors import ConfigError

if TYPE_CHECKING:
    from chunkgraph.engine.banks import Derive
    from chunkgraph.packing import PackedShape

__all__ = ["Shortage", "Step", "StepInputs", "StepPlan", "StepPlanner"]


@dataclass(frozen=True)
class StepInputs:
    """What a caller says of a training step, ahead of it or when it begins.

    Attributes:
        packings: tokens of each document of each microbatch; None: not given.
        misfit: why the step cannot be replayed, or "".
        buckets: rows of each microbatch; None: of the smallest bucket that holds it.
        contexts: the bank of each microbatch, where context-parallel sizes change.
    """

    packings: Sequence[Sequence[int]] | None = None
    misfit: str = ""
    buckets: Sequence[int] | None = None
    contexts: Sequence[Any] | None = None


@dataclass(frozen=True)
class StepPlan:
    """What is known of the microbatches of a step when it begins.

    Attributes:
        misfit: why the step cannot be replayed, or "". None: what was announced holds.
        repeated_misfit: the same for a second run of the step, for which no announcement holds.
        banks: of each microbatch; None: there is one.
        digest: of the plan that all ranks follow in this step; 0 without one.
        rows: of each microbatch; None: as many as the schedule says.
        cut_for: banks to whose sequences offsets are cut.
        is_repeated: whether the step runs again, since something had no room.
    """

    misfit: str | None = None
    repeated_misfit: str | None = None
    banks: Sequence[Hashable] | None = None
    digest: int = 0
    rows: Sequence[int] | None = None
    cut_for: Sequence[Hashable] = ()
    is_repeated: bool = False

    @property
    def repeated(self) -> StepPlan:
        """The plan of a second run of the step."""
        return replace(self, misfit=self.repeated_misfit, is_repeated=True)


@dataclass(frozen=True)
class Step:
    """One run of a step's schedule.

    Attributes:
        mode: how it runs.
        is_training: False: a step of forwards only.
        plan: what is known of its microbatches.
    """

    mode: StepMode
    is_training: bool
    plan: StepPlan

    @property
    def is_replayed(self) -> bool:
        """Whether graphs are replayed."""
        return self.mode is StepMode.REPLAY


@dataclass(frozen=True)
class Shortage:
    """What a feature had no room for in a training step, on this rank.

    Attributes:
        name: counts it in reports.
        amount: how much; 0: all had room.
        text: for the log of this rank.
        is_at_limit: whether there cannot be more room on this rank.
        late: counts of the step before, which are errors.
    """

    name: str
    amount: int
    text: str = ""
    is_at_limit: bool = False
    late: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of which ranks take the maximum."""
        return (self.amount, int(self.is_at_limit), *self.late)


class StepPlanner:
    """The variants of every slot, and the variant of each microbatch of a step. Here: one.

    Attributes:
        keys: of the variants, largest first.
        derive: makes a call of one variant from that of another; see `ChunkGraphs`.
        inputs: the fields of `StepInputs` that training steps take, besides ``misfit``; empty:
            nothing is known of a step ahead.
        drops_failed: whether ranks go on without a bank that one of them cannot capture.
        shapes: by rows, each packed shape with the most sequences, largest first.
        all_shapes: every packed shape, largest first.
    """

    keys: Sequence[Hashable] = (None,)
    derive: Derive | None = None
    inputs: Sequence[str] = ()
    drops_failed = False
    shapes: Mapping[int, PackedShape] = {}
    all_shapes: Sequence[PackedShape] = ()

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Settle what is known of the training step that begins.

        Args:
            inputs: what the caller says of it.
            schedule: keywords of the schedule.

        Raises:
            ConfigError: too little is known, or it was announced otherwise.
        """
        return StepPlan()

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Remember what the next training step holds.

        Returns:
            Why it cannot be replayed, or "", and the digest of the plan that all ranks follow.

        Raises:
            ConfigError: nothing is known of steps ahead.
        """
        raise ConfigError(
            "Steps are announced to chunk graphs attached with `packing`, and with packings=... or "
            "contexts=..."
        )

    def withdraw(self) -> None:
        """Forget what was announced."""

    def agree_on_buckets(self, packings: Sequence[Sequence[int]]) -> list[int]:
        """Choose the rows of each microbatch, the same on all ranks; all of them call it together.

        Raises:
            ConfigError: there are no buckets.
        """
        raise ConfigError("There are buckets in chunk graphs attached with `packing`.")

    def name(self, key: Hashable) -> str:
        """Name a bank in reports; "" leaves it out."""
        return ""

    def refuse_unknown(self, inputs: StepInputs) -> None:
        """Refuse what these banks know nothing of.

        Raises:
            ConfigError: naming it.
        """
        is_packed = "packings" in self.inputs
        if not is_packed and (inputs.packings is not None or inputs.buckets is not None):
            raise ConfigError(
                "The step was given packings, but the chunk graphs know of no packing. Give "
                "attach() the shape: attach(..., packing=PackedShape(...))."
            )
        if "contexts" not in self.inputs and inputs.contexts is not None:
            raise ConfigError(
                "The step was given contexts, but the chunk graphs know of none. Give attach() "
                "the banks: attach(..., packing=ContextBanks(...))."
            )
        if inputs.misfit and not self.inputs:
            raise ConfigError(
                f"The step was given a misfit ({inputs.misfit}), which only chunk graphs know of "
                "that were attached with `packing`. Leave it out."
            )

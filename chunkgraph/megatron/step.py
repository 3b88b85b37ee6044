"""A step of the schedule as features see it: its inputs, its plan, its mode, its shortages."""

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
    """The contents of a training step, as the caller announces or passes them.

    Attributes:
        packings: Number of tokens of each document of each microbatch; None if not passed.
        misfit: Why the step cannot be replayed, or "".
        buckets: Rows of each microbatch; None for those of the smallest bucket that holds it.
        contexts: The bank of each microbatch, if context-parallel sizes change.
    """

    packings: Sequence[Sequence[int]] | None = None
    misfit: str = ""
    buckets: Sequence[int] | None = None
    contexts: Sequence[Any] | None = None


@dataclass(frozen=True)
class StepPlan:
    """The plan of a step's microbatches, known when the step begins.

    Attributes:
        misfit: Why the step cannot be replayed, or "". None if the announced misfit applies.
        repeated_misfit: The same for a second run of the step, which has no announcement.
        banks: The bank of each microbatch; None with a single bank.
        digest: Digest of the plan that all ranks follow in this step; 0 without a plan.
        rows: Rows of each microbatch; None for those of the schedule.
        cut_for: Banks to whose number of sequences offsets are cut.
        is_repeated: Whether the step runs again because something had no room.
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
        """Return the plan of a second run of the step."""
        return replace(self, misfit=self.repeated_misfit, is_repeated=True)


@dataclass(frozen=True)
class Step:
    """One run of a step's schedule.

    Attributes:
        mode: How the step runs.
        is_training: Whether the step has backwards.
        plan: The plan of its microbatches.
    """

    mode: StepMode
    is_training: bool
    plan: StepPlan

    @property
    def is_replayed(self) -> bool:
        """Return whether graphs are replayed."""
        return self.mode is StepMode.REPLAY


@dataclass(frozen=True)
class Shortage:
    """A shortage of room for one feature in a training step, on this rank.

    Attributes:
        name: Name in reports.
        amount: The missing amount; 0 if everything had room.
        text: Text for the log of this rank.
        is_at_limit: Whether this rank cannot provide more room.
        limit: Names of the settings that limit the room.
    """

    name: str
    amount: int
    text: str = ""
    is_at_limit: bool = False
    limit: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers whose maximum the ranks compute."""
        return self.amount, int(self.is_at_limit)


class StepPlanner:
    """Plan the bank (variant of every slot) of each microbatch. The base class has one bank.

    Attributes:
        keys: Keys of the banks, largest first.
        derive: Function that derives a call for one bank from a call for another; see
            `ChunkGraphs`.
        inputs: Fields of `StepInputs` that training steps take with ``misfit``. If empty, steps
            cannot be announced.
        drops_failed: Whether ranks continue without a bank that one of them cannot capture.
        shapes: Packed shapes with the most sequences, by rows, largest first.
        all_shapes: All packed shapes, largest first.
    """

    keys: Sequence[Hashable] = (None,)
    derive: Derive | None = None
    inputs: Sequence[str] = ()
    drops_failed = False
    shapes: Mapping[int, PackedShape] = {}
    all_shapes: Sequence[PackedShape] = ()

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Plan the training step that begins.

        Args:
            inputs: The contents of the step that the caller passes.
            schedule: Keywords of the schedule.

        Raises:
            ConfigError: The inputs are incomplete, or differ from the announcement.
        """
        return StepPlan()

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Record the contents of the next training step.

        Returns:
            The reason that the step cannot be replayed, or "", and the digest of the plan that all
            ranks follow.

        Raises:
            ConfigError: Steps cannot be announced.
        """
        raise ConfigError(
            "Only chunk graphs attached with `packing` take announcements, with packings=... or "
            "contexts=..."
        )

    def withdraw(self) -> None:
        """Discard the announcement."""

    def agree_on_buckets(self, packings: Sequence[Sequence[int]]) -> list[int]:
        """Return the rows of each microbatch, alike on all ranks, which call this together.

        Raises:
            ConfigError: There are no buckets.
        """
        raise ConfigError("Only chunk graphs attached with `packing` have buckets.")

    def name(self, key: Hashable) -> str:
        """Return the name of a bank in reports; "" leaves it out."""
        return ""

    def refuse_unknown(self, inputs: StepInputs) -> None:
        """Refuse inputs that these banks do not take.

        Raises:
            ConfigError: There is such an input; the message names it.
        """
        is_packed = "packings" in self.inputs
        if not is_packed and (inputs.packings is not None or inputs.buckets is not None):
            raise ConfigError(
                "The step has packings, but the chunk graphs were attached without packing. Pass "
                "the shape to attach(): attach(..., packing=PackedShape(...))."
            )
        if "contexts" not in self.inputs and inputs.contexts is not None:
            raise ConfigError(
                "The step has contexts, but the chunk graphs were attached without them. Pass the "
                "banks to attach(): attach(..., packing=PackedBanks.of_limits(...))."
            )
        if inputs.misfit and not self.inputs:
            raise ConfigError(
                f"The step has a misfit ({inputs.misfit}), which only chunk graphs attached with "
                "`packing` take. Leave it out."
            )

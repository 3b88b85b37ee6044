"""What this rank asks the others about each step, and what they decide together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from chunkgraph.engine.decide.agreement import Agreement
from chunkgraph.engine.decide.announcement import Announcement, digest_of, has_one_digest
from chunkgraph.engine.decide.reasons import Agree, EagerReason, reason_of
from chunkgraph.errors import ConfigError, SlotError

__all__ = ["SHAPE_UNKNOWN", "Standing", "StepDecider", "StepKind"]

SHAPE_UNKNOWN = object()
"""The shape key of a step that has not been seen."""


@dataclass(frozen=True)
class StepKind:
    """What a step is called with, the same on all ranks but for the misfit.

    Attributes:
        forward_only: an evaluation step.
        shape_key: whatever fixes the input shapes.
        is_asked_eager: the caller wants it eager.
        misfit: why this rank's inputs do not fit the graphs, "" if they do.
        plan_digest: of a plan that all ranks are to follow together, such as who works on which
            documents; 0 without one.
    """

    forward_only: bool = False
    shape_key: Hashable = None
    is_asked_eager: bool = False
    misfit: str = ""
    plan_digest: int = 0


@dataclass(frozen=True)
class Standing:
    """What of a rank bears on how its steps run.

    Attributes:
        is_captured: graphs are there.
        captured_key: the shape key they were captured with.
        has_failed: the last session failed.
        was_released: graphs were there and were released.
        is_ready: whether graphs could be captured before a step of this shape key.
        is_replaced: whether something else lies, since the last step, where graphs work.
    """

    is_captured: bool
    captured_key: Hashable
    has_failed: bool
    was_released: bool
    is_ready: Callable[[Hashable], bool]
    is_replaced: bool = False


class StepDecider:
    """Decides of every step, with the other ranks, whether it replays.

    Args:
        agree: see `Agree`.
        standing: of this rank, at the moment.
        takes_misfits: every training step states whether its inputs fit.

    Attributes:
        agreement: of the ranks.
    """

    def __init__(
        self, agree: Agree, standing: Callable[[], Standing], *, takes_misfits: bool
    ) -> None:
        self.agreement = Agreement(agree)
        self._standing = standing
        self._announcement = Announcement() if takes_misfits else None
        self._usual_key: Hashable = SHAPE_UNKNOWN  # of the last training step that fitted
        self._num_withdrawn = 0

    @property
    def has_announcement(self) -> bool:
        """Whether the next step was announced."""
        return self._announcement is not None and self._announcement.misfit is not None

    def announce(self, misfit: str, plan_digest: int, *, is_in_step: bool) -> None:
        """Take the word on the next training step; ask about it unless a step is running.

        Raises:
            SlotError: that step was announced already.
        """
        if self._announcement is None:
            raise ValueError("takes_misfits is False: steps are not announced")
        self._announcement.give(misfit, plan_digest)
        if not is_in_step:
            self._ask_ahead(self._usual_key)

    def withdraw(self) -> None:
        """Take back the word on the next training step, if there is one; all ranks do."""
        if self._announcement is None:
            raise ValueError("takes_misfits is False: steps are not announced")
        self._announcement.clear()
        self._num_withdrawn += 1

    def resolve_misfit(
        self, misfit: str | None, plan_digest: int, *, forward_only: bool
    ) -> tuple[str, int]:
        """Return why this rank's inputs of the step that begins do not fit, or "", and the digest.

        Both are as announced, if they were announced. They stay so until the step is decided on.

        Raises:
            SlotError: whether they fit is unknown, or the step was announced otherwise.
        """
        if self._announcement is None:
            if misfit is not None or plan_digest:
                raise ValueError("takes_misfits is False: steps take no misfit and no plan")
            return "", 0
        if forward_only:
            return "", 0
        if not self.has_announcement:
            return self._announcement.word(misfit), plan_digest
        announced = self._announcement.plan_digest
        word = self._announcement.word(misfit)
        if plan_digest not in (0, announced):
            raise SlotError(
                f"The step was announced with another plan (digest {announced}) than it was then "
                f"given ({plan_digest}): of who works on which documents, or in how many "
                "microbatches. The other ranks follow the former. Announce the plan that the step "
                "is going to have."
            )
        return word, announced

    def decide(self, step: StepKind) -> tuple[EagerReason, bool]:
        """Agree with the other ranks on this step.

        Returns:
            Why it is eager, if it is, and whether graphs are missing on some rank: all of them
            then capture before a step that replays.

        Raises:
            ConfigError: on all ranks: they were given different plans of the step.
        """
        if self._announcement is not None and not step.forward_only:
            self._announcement.clear()
        kind, asked = self._question(step)
        if self._announcement is None:
            reason, some_without = self.agreement.answer(kind, asked)
        else:
            reason, some_without, *plans = self.agreement.answer(kind, asked, has_one_digest)
            if plans[0] != -plans[1]:
                raise ConfigError(
                    "The ranks were given different plans of this step: of who works on which "
                    "documents, or in how many microbatches "
                    f"(digests {-plans[1]} to {plans[0]}, this rank's {step.plan_digest}). They "
                    "would wait for each other for ever, or mix up results. Make the plan of the "
                    "same documents and limits on every rank, pipeline stages included."
                )
        if not (step.forward_only or step.misfit):
            self._usual_key = step.shape_key
        return EagerReason(reason), bool(some_without)

    def end_step(self, step: StepKind) -> None:
        """A step ended well; the next one is most likely like it, so ask about that one now."""
        if not (step.forward_only or step.is_asked_eager):
            self._ask_ahead(step.shape_key if self._announcement is None else self._usual_key)

    def released(self) -> None:
        """The graphs are gone on all ranks, and with them what was asked about the next step."""
        if self._announcement is None:  # else the digests tell
            self.agreement.expire()

    def _ask_ahead(self, shape_key: Hashable) -> None:
        """Ask about the next step, if enough of it is known."""
        misfit, plan_digest = "", 0
        if self._announcement is not None:
            if self._announcement.misfit is None:
                return
            misfit, plan_digest = self._announcement.misfit, self._announcement.plan_digest
        if shape_key is not SHAPE_UNKNOWN:
            step = StepKind(shape_key=shape_key, misfit=misfit, plan_digest=plan_digest)
            self.agreement.post(*self._question(step))

    def _question(self, step: StepKind) -> tuple[Hashable, list[int]]:
        """The kind of a step, and what this rank asks the others about it."""
        # The shapes of a step that does not fit are its rank's own.
        shape_key = self._usual_key if step.misfit else step.shape_key
        standing = self._standing()
        own = EagerReason.NONE
        if step.forward_only:
            own = EagerReason.FORWARD_ONLY
        elif standing.has_failed:
            own = EagerReason.CAPTURE_FAILED
        elif step.is_asked_eager:
            own = EagerReason.REQUESTED
        elif standing.is_replaced:
            own = EagerReason.MEMORY_REPLACED
        elif standing.is_captured:
            if shape_key != standing.captured_key:
                own = EagerReason.SHAPES_DIFFER
        elif not standing.is_ready(shape_key):
            own = EagerReason.RELEASED if standing.was_released else EagerReason.CAPTURE_WARMUP
        kind = (step.forward_only, shape_key, step.is_asked_eager)
        is_without = int(not standing.is_captured)
        if self._announcement is None:
            return kind, [own, is_without]
        reason = max(own, reason_of(step.misfit))
        plans = [step.plan_digest, -step.plan_digest]
        digest = digest_of(kind, own, is_without, self._num_withdrawn)
        return kind, [reason, is_without, *plans, *digest]

"""Ask the other ranks about each step, and decide together with them."""

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
    """The arguments of a step, equal on all ranks except for the misfit.

    Attributes:
        forward_only: Whether this is an evaluation step.
        shape_key: Value that determines the input shapes.
        is_eager_requested: Whether the caller requests an eager step.
        misfit: The reason why this rank's inputs do not fit the graphs; "" if they fit.
        plan_digest: Digest of a plan that all ranks follow together, such as which rank works on
            which documents; 0 without one.
    """

    forward_only: bool = False
    shape_key: Hashable = None
    is_eager_requested: bool = False
    misfit: str = ""
    plan_digest: int = 0


@dataclass(frozen=True)
class Standing:
    """The state of a rank that affects how its steps run.

    Attributes:
        is_captured: Whether graphs exist.
        captured_key: Shape key of the capture.
        has_failed: Whether the last session failed.
        was_released: Whether graphs existed and were released.
        is_ready: Function that returns whether graphs could be captured before a step of this
            shape key.
        is_replaced: Whether memory that graphs use was replaced, as of the end of the last step.
    """

    is_captured: bool
    captured_key: Hashable
    has_failed: bool
    was_released: bool
    is_ready: Callable[[Hashable], bool]
    is_replaced: bool = False


class StepDecider:
    """Decide with the other ranks whether each step replays.

    Args:
        agree: See `Agree`.
        standing: Function that returns this rank's present standing.
        takes_misfits: Whether every training step states whether its inputs fit.

    Attributes:
        agreement: The agreement of the ranks.
    """

    def __init__(
        self, agree: Agree, standing: Callable[[], Standing], *, takes_misfits: bool
    ) -> None:
        self.agreement = Agreement(agree)
        self._standing = standing
        self._announcement = Announcement() if takes_misfits else None
        self._usual_key: Hashable = SHAPE_UNKNOWN  # of the last training step that fit
        self._num_withdrawn = 0

    @property
    def has_announcement(self) -> bool:
        """Whether the next step was announced."""
        return self._announcement is not None and self._announcement.misfit is not None

    def announce(self, misfit: str, plan_digest: int, *, is_in_step: bool) -> None:
        """Announce the next training step; ask about it unless a step is running.

        Raises:
            SlotError: The step was announced already.
        """
        if self._announcement is None:
            raise ValueError("takes_misfits is False: steps are not announced")
        self._announcement.announce(misfit, plan_digest)
        if not is_in_step:
            self._ask_ahead(self._usual_key)

    def withdraw(self) -> None:
        """Withdraw the next training step's announcement, if any. All ranks call this together."""
        if self._announcement is None:
            raise ValueError("takes_misfits is False: steps are not announced")
        self._announcement.clear()
        self._num_withdrawn += 1

    def resolve_misfit(
        self, misfit: str | None, plan_digest: int, *, forward_only: bool
    ) -> tuple[str, int]:
        """Return the misfit of this rank's inputs for the step that begins, and the plan digest.

        If the step was announced, both come from the announcement, which stays until the step is
        decided.

        Raises:
            SlotError: It is unknown whether the inputs fit, or the announcement contradicts the
                arguments.
        """
        if self._announcement is None:
            if misfit is not None or plan_digest:
                raise ValueError("takes_misfits is False: steps take no misfit and no plan")
            return "", 0
        if forward_only:
            return "", 0
        if not self.has_announcement:
            return self._announcement.resolve(misfit), plan_digest
        announced_digest = self._announcement.plan_digest
        misfit = self._announcement.resolve(misfit)
        if plan_digest not in (0, announced_digest):
            raise SlotError(
                f"The step began with another plan (digest {plan_digest}) than the announced one "
                f"({announced_digest}): documents are assigned to other ranks or microbatches. The "
                "other ranks follow the announced plan. Announce the plan that the step will have."
            )
        return misfit, announced_digest

    def decide(self, step: StepKind) -> tuple[EagerReason, bool]:
        """Agree with the other ranks on this step.

        Returns:
            The reason why the step is eager, if it is, and whether graphs are missing on some rank;
            if so, all ranks capture before a step that replays.

        Raises:
            ConfigError: The ranks have different plans for the step; all ranks raise.
        """
        if self._announcement is not None and not step.forward_only:
            self._announcement.clear()
        kind, values = self._question(step)
        if self._announcement is None:
            reason, some_without = self.agreement.answer(kind, values)
        else:
            reason, some_without, *plans = self.agreement.answer(kind, values, has_one_digest)
            if plans[0] != -plans[1]:
                raise ConfigError(
                    "The ranks have different plans for this step: they assign documents to other "
                    f"ranks or microbatches (digests {-plans[1]} to {plans[0]}, this rank's "
                    f"{step.plan_digest}). They would wait for each other forever, or mix up "
                    "results. Compute the plan from the same documents and limits on every rank, "
                    "including all pipeline stages."
                )
        if not (step.forward_only or step.misfit):
            self._usual_key = step.shape_key
        return EagerReason(reason), bool(some_without)

    def end_step(self, step: StepKind) -> None:
        """Ask about the next step, which is most likely like this one, after a step ended well."""
        if not (step.forward_only or step.is_eager_requested):
            self._ask_ahead(step.shape_key if self._announcement is None else self._usual_key)

    def released(self) -> None:
        """Invalidate the question about the next step: all ranks have released their graphs."""
        if self._announcement is None:  # otherwise the digests differ
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
        """Return the kind of a step, and this rank's values for the agreement on it."""
        # The shapes of a step that does not fit are specific to its rank.
        shape_key = self._usual_key if step.misfit else step.shape_key
        standing = self._standing()
        own = EagerReason.NONE
        if step.forward_only:
            own = EagerReason.FORWARD_ONLY
        elif standing.has_failed:
            own = EagerReason.CAPTURE_FAILED
        elif step.is_eager_requested:
            own = EagerReason.REQUESTED
        elif standing.is_replaced:
            own = EagerReason.MEMORY_REPLACED
        elif standing.is_captured:
            if shape_key != standing.captured_key:
                own = EagerReason.SHAPES_DIFFER
        elif not standing.is_ready(shape_key):
            own = EagerReason.RELEASED if standing.was_released else EagerReason.CAPTURE_WARMUP
        kind = (step.forward_only, shape_key, step.is_eager_requested)
        is_without = int(not standing.is_captured)
        if self._announcement is None:
            return kind, [own, is_without]
        reason = max(own, reason_of(step.misfit))
        plans = [step.plan_digest, -step.plan_digest]
        digest = digest_of(kind, own, is_without, self._num_withdrawn)
        return kind, [reason, is_without, *plans, *digest]

"""Decide once per step, together on all ranks, whether it replays or runs eagerly.

A rank that fell back alone, or in the middle of a step, would leave the others waiting in a
collective. So only whole steps fall back, and the ranks agree on the largest reason before the step
starts.

A collective on the host takes 0.4 to 1 ms between two processes (measured with gloo); meanwhile a
device with an empty queue idles. So the question about the next step is posted when a step ends,
and the answer arrives long before that step begins. It is used if the step is the assumed one.

Inputs differ between ranks, so those of a single rank may not fit. All ranks must know this before
the step, and none may wait for an answer that no rank sends. So:

* each rank asks once about each training step: early if the step was announced before the
  previous step ended (or between the two), otherwise when the step begins. Questions are matched by
  their number, so only some of the ranks may announce a step;
* a question sent early carries the announcement. If the inputs of the step contradict it, the rank
  raises before anything runs, so no rank silently departs from the agreement;
* each question carries a digest of what an answer depends on (whether the step trains, its shapes,
  the rank's state). If the digests differ, a rank asked early about another step than the one that
  began, or the ranks' states differ; all ranks see this and ask once more, together;
* all ranks together can withdraw announcements, including ranks that announced nothing. The digest
  counts the withdrawals, so no answer to an earlier question is used.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import replace

from chunkgraph.engine.agreement import Agreement
from chunkgraph.engine.step import NO_GRAPHS, SHAPE_UNKNOWN, EagerReason, StepPlan, StepRequest
from chunkgraph.errors import ConfigError, SlotError

RankState = Callable[[Hashable], tuple[EagerReason, bool]]
"""Returns why a training step of a shape key would run eagerly here, and whether graphs exist."""


class StepDecider:
    """Decide with the other ranks whether each step replays.

    Args:
        agreement: The agreement of the ranks.
        state: See `RankState`.
        takes_misfits: Whether every training step states whether its inputs fit.
        is_training: Whether these steps train; questions about others have other digests.
        asks_ahead: Whether the state stays the same from the end of a step to the next one.
    """

    def __init__(
        self,
        agreement: Agreement,
        state: RankState,
        *,
        takes_misfits: bool,
        is_training: bool = True,
        asks_ahead: bool = True,
    ) -> None:
        self.agreement = agreement
        self._state = state
        self._takes_misfits = takes_misfits
        self._is_training, self._asks_ahead = is_training, asks_ahead
        self._announced: StepPlan | None = None  # of the next step
        self._usual_shape_key: Hashable = SHAPE_UNKNOWN  # of the last training step that fit
        self._num_withdrawn = 0

    @property
    def is_announced(self) -> bool:
        """Return whether the next step was announced."""
        return self._announced is not None

    def announce(self, plan: StepPlan, *, is_in_step: bool) -> None:
        """Announce the next training step; ask about it unless a step is running.

        Raises:
            SlotError: The step was announced already.
        """
        self._require_misfits()
        if self._announced is not None:
            raise SlotError(
                "The next step was announced already. Announce each step once, while the previous "
                "step runs or after it."
            )
        self._announced = replace(plan, misfit=plan.misfit or "")
        if not is_in_step:
            self._ask_ahead()

    def withdraw(self) -> None:
        """Withdraw the next training step's announcement, if any. All ranks call this together."""
        self._require_misfits()
        self._announced = None
        self._num_withdrawn += 1

    def resolve(self, step: StepRequest) -> StepRequest:
        """Return the step that begins, with the misfit of this rank's inputs: "" if they fit.

        If the step was announced, its misfit and plan come from the announcement, which stays until
        the step is decided.

        Raises:
            SlotError: It is unknown whether the inputs fit, or the announcement contradicts the
                arguments.
        """
        misfit, digest = step.plan.misfit, step.plan.digest
        if misfit is not None or digest:
            self._require_misfits()
        if not self._takes_misfits:
            return replace(step, plan=replace(step.plan, misfit=""))
        if self._announced is None:
            if misfit is None:
                raise SlotError(
                    "A training step began, but it was neither announced nor called with a misfit, "
                    "so it is unknown whether its inputs fit the graphs. Pass "
                    'plan=StepPlan(misfit=...) to step() ("" if they fit), or call announce() '
                    "before, on every rank."
                )
            return step
        announced = self._announced.misfit
        if misfit is not None and bool(announced) != bool(misfit):
            verdicts = {True: "do not fit", False: "fit"}
            raise SlotError(
                f"The step was announced with inputs that {verdicts[bool(announced)]} the graphs, "
                f"but its inputs {verdicts[bool(misfit)]} ({announced or misfit}). The other ranks "
                "follow the announcement. Announce the inputs that the step will have."
            )
        if digest not in (0, self._announced.digest):
            raise SlotError(
                f"The step began with another plan (digest {digest}) than the announced one "
                f"({self._announced.digest}): documents are assigned to other ranks or "
                "microbatches. The other ranks follow the announced plan. Announce the plan that "
                "the step will have."
            )
        return replace(step, plan=replace(self._announced, banks=step.plan.banks))

    def decide(self, step: StepRequest) -> tuple[EagerReason, bool]:
        """Agree with the other ranks on this step.

        Returns:
            The reason why the step is eager, if it is, and whether graphs are missing on some rank;
            if so, all ranks capture before a step that replays.

        Raises:
            ConfigError: The ranks have different plans for the step; all ranks raise.
        """
        self._announced = None
        if not step.plan.misfit:  # otherwise its shapes are specific to this rank
            self._usual_shape_key = step.shape_key
        reason, some_without, most, least, *_ = self.agreement.answer(self._question(step))
        if most != -least:
            raise ConfigError(
                "The ranks have different plans for this step: they assign documents to other "
                f"ranks or microbatches (digests {-least} to {most}, this rank's "
                f"{step.plan.digest}). They would wait for each other forever, or mix up results. "
                "Compute the plan from the same documents and limits on every rank, including all "
                "pipeline stages."
            )
        return EagerReason(reason), bool(some_without)

    def end_step(self, step: StepRequest) -> None:
        """Ask about the next step, which is most likely like this one, after a step ended well."""
        if not step.eager:
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        """Ask about the next step, if enough of it is known."""
        is_known = self.is_announced or not self._takes_misfits
        if self._asks_ahead and is_known and self._usual_shape_key is not SHAPE_UNKNOWN:
            plan = self._announced or StepPlan(misfit="")
            self.agreement.post(self._question(StepRequest(plan=plan)))

    def _question(self, step: StepRequest) -> list[int]:
        """Return this rank's values for the agreement on a step."""
        own, has_graphs = self._state(self._usual_shape_key)
        if step.eager:
            own = max(own, EagerReason.REQUESTED)
        reason = own
        if misfit := step.plan.misfit:
            is_missing = misfit.startswith(NO_GRAPHS)
            why = EagerReason.BANK_MISSING if is_missing else EagerReason.PACKING_OVERFLOW
            reason = max(own, why)
        equal = self._is_training, self._usual_shape_key, step.eager, own, has_graphs
        digest = zlib.crc32(repr((*equal, self._num_withdrawn)).encode())
        plan = step.plan.digest
        # The ranks take the largest of each; x and -x together tell whether all x are equal.
        return [int(reason), int(not has_graphs), plan, -plan, digest, -digest]

    def _require_misfits(self) -> None:
        if not self._takes_misfits:
            raise ConfigError(
                "A step has a misfit, a digest or an announcement, but the engine takes none. Pass "
                "ChunkGraphs takes_misfits=True, on every rank."
            )

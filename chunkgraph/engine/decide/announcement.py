"""Announce, early or when a step begins, whether this rank's inputs fit the captured graphs.

Ranks have different inputs, so the inputs of a single rank may not fit. All ranks must know this
before the step, and none may wait for an answer that no rank sends. So:

* each rank asks once about each training step: early if the step was announced before the
  previous step ended (or between the two), otherwise when the step begins. Questions are matched by
  their number, so only some of the ranks may announce a step;
* a question sent early carries the announcement. If the inputs of the step contradict it, the rank
  raises before anything runs, so no rank silently departs from the agreement;
* each question carries a digest of everything that must be equal on all ranks (whether the step
  trains, its shapes, whether graphs exist). If the digests differ, a rank asked early about another
  step than the one that began; all ranks see this and ask once more, together;
* all ranks together can withdraw announcements, including ranks that announced nothing. The digest
  counts the withdrawals, so no answer to an earlier question is used.
"""

from __future__ import annotations

import zlib

from chunkgraph.errors import SlotError

__all__ = ["Announcement", "digest_of", "has_one_digest"]


class Announcement:
    """This rank's announcement of its next training step, kept until that step is decided."""

    def __init__(self) -> None:
        self._misfit: str | None = None
        self.plan_digest = 0
        """Plan digest of the last announced step."""

    @property
    def misfit(self) -> str | None:
        """Return why the next step does not fit; "" if it does, None if nothing was announced."""
        return self._misfit

    def announce(self, misfit: str, plan_digest: int = 0) -> None:
        """Announce the next step.

        Args:
            misfit: The reason why the step does not fit; "" if it fits.
            plan_digest: See `StepKind`.

        Raises:
            SlotError: The step was announced before.
        """
        if self._misfit is not None:
            raise SlotError(
                "The next step was announced already. Announce each step once, while the previous "
                "step runs or after it."
            )
        self._misfit, self.plan_digest = misfit, plan_digest

    def resolve(self, misfit: str | None) -> str:
        """Return the misfit of the step that begins now: the announced one, else ``misfit``.

        The announcement stays until `clear`, so it still holds after an error.

        Args:
            misfit: The misfit that was passed to the step; "" if it fits, None if it was omitted.

        Raises:
            SlotError: The misfit was neither announced nor passed, or the two disagree.
        """
        announced = self._misfit
        if announced is None and misfit is None:
            raise SlotError(
                "A training step began, but it was neither announced nor called with a misfit, so "
                'it is unknown whether its inputs fit the graphs. Pass misfit=... to step() ("" '
                "if they fit), or call announce() before, on every rank."
            )
        if announced is not None and misfit is not None and bool(announced) != bool(misfit):
            verdicts = {True: "do not fit", False: "fit"}
            raise SlotError(
                f"The step was announced with inputs that {verdicts[bool(announced)]} the graphs, "
                f"but its inputs {verdicts[bool(misfit)]} ({announced or misfit}). The other ranks "
                "follow the announcement. Announce the inputs that the step will have."
            )
        return announced if announced is not None else misfit or ""

    def clear(self) -> None:
        """Forget the announcement: its step begins, or it is withdrawn."""
        self._misfit = None


def digest_of(*facts: object) -> list[int]:
    """Return two numbers; their maxima over all ranks show whether all have the same facts."""
    digest = zlib.crc32(repr(facts).encode())
    return [digest, -digest]


def has_one_digest(agreed: list[int]) -> bool:
    """Return whether the last two agreed values come from the same facts on all ranks."""
    return agreed[-2] == -agreed[-1]

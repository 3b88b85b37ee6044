"""Whether a step fits the captured graphs, as each rank says of its own inputs, early or late.

Ranks have different inputs, so one rank may know that its step does not fit while no other does.
All ranks must know it before the step, and none may wait for an answer that nobody sends. So:

* every rank asks once about every training step: early if the step was announced before the
  previous step ended (or between the two), otherwise when the step begins. Questions pair up by
  their number, so ranks that announce and ranks that do not may meet;
* the announcement is what was asked. If the step then gets something else, its rank raises before
  anything runs, so no rank silently departs from the agreement;
* each question carries a digest of everything that must be equal on all ranks (whether the step
  trains, its shapes, whether graphs exist). If the digests differ, a rank asked early about a step
  that did not come; all ranks see that and ask once more, together;
* all ranks together can withdraw announcements, including ranks that announced nothing. The digest
  counts the withdrawals, so no answer to an earlier question is used.
"""

from __future__ import annotations

import zlib

from chunkgraph.errors import SlotError

__all__ = ["Announcement", "digest_of", "has_one_digest"]


class Announcement:
    """This rank's announcement of its next training step, kept until the step takes it."""

    def __init__(self) -> None:
        self._misfit: str | None = None
        self.plan_digest = 0
        """Plan digest of the last announced step."""

    @property
    def misfit(self) -> str | None:
        """Return why the next step does not fit; "" if it does, None if nothing was announced."""
        return self._misfit

    def give(self, misfit: str, plan_digest: int = 0) -> None:
        """Announce the next step.

        Args:
            misfit: The reason why the step does not fit; "" if it fits.
            plan_digest: See `StepKind`.

        Raises:
            SlotError: The step was announced before.
        """
        if self._misfit is not None:
            raise SlotError(
                "The next step was announced already. One announcement belongs to each step: give "
                "it while the step before is running or after it, and only once."
            )
        self._misfit, self.plan_digest = misfit, plan_digest

    def word(self, given: str | None) -> str:
        """Return the misfit that holds for the step that begins now, given the one of its call.

        The announcement stays until `clear`, so it still holds after an error.

        Raises:
            SlotError: Neither the call nor an announcement says whether the step fits, or the two
                disagree.
        """
        announced = self._misfit
        if announced is None and given is None:
            raise SlotError(
                "A training step began without a word on whether its inputs fit the graphs, and "
                "was not announced either. Say it of every step, on every rank."
            )
        if announced is not None and given is not None and bool(announced) != bool(given):
            said = {True: "does not fit", False: "fits"}
            raise SlotError(
                f"The step was announced as one that {said[bool(announced)]}, but its inputs are "
                f"such that it {said[bool(given)]} ({announced or given}). The other ranks were "
                "told the former. Announce the inputs that the step is going to have."
            )
        return announced if announced is not None else given or ""

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

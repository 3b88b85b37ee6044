"""Whether a step fits what is captured, as each rank says of its own inputs: early or late.

Ranks have different inputs, so one rank may know that its step does not fit while no other does.
All of them must hear of it before the step, and none may wait for an answer that nobody sends. So:

* every rank asks about every training step once: early if the step was announced before the step
  before it ended (or between the two), otherwise when the step begins. Questions pair up by their
  number, so ranks that announce and ranks that do not may meet;
* what was announced is what was asked. A step that is then given something else raises on its rank
  before anything runs: no rank can leave the agreed way in silence;
* with each question goes a digest of all that has to be alike on all ranks (whether the step
  trains, its shapes, whether graphs are there). If the digests differ, a rank asked early assuming
  a step that did not come, and all ranks see that and ask once more, together;
* what was announced can be taken back by all ranks together, those too that announced nothing. How
  often that was is in the digest, so that no answer to an earlier question is taken.
"""

from __future__ import annotations

import zlib

from chunkgraph.errors import SlotError

__all__ = ["Announcement", "digest_of", "has_one_digest"]


class Announcement:
    """What this rank said of its next training step, until that step takes it."""

    def __init__(self) -> None:
        self._misfit: str | None = None
        self.plan_digest = 0
        """What `give` was told of the step, or of the one before."""

    @property
    def misfit(self) -> str | None:
        """Why the next step does not fit, "" if it does, None if nothing was announced."""
        return self._misfit

    def give(self, misfit: str, plan_digest: int = 0) -> None:
        """Announce the next step.

        Args:
            misfit: why it does not fit, or "".
            plan_digest: see `StepKind`.

        Raises:
            SlotError: it was announced before.
        """
        if self._misfit is not None:
            raise SlotError(
                "The next step was announced already. One announcement belongs to each step: give "
                "it while the step before is running or after it, and only once."
            )
        self._misfit, self.plan_digest = misfit, plan_digest

    def word(self, given: str | None) -> str:
        """What holds for the step that begins now, given what it was called with.

        It stays until `clear`: after an error it still holds.

        Raises:
            SlotError: nobody said whether the step fits, or it was announced otherwise.
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
        """Forget what was announced: its step begins, or it is taken back."""
        self._misfit = None


def digest_of(*facts: object) -> list[int]:
    """Two numbers whose maxima over all ranks tell whether all ranks have the same facts."""
    digest = zlib.crc32(repr(facts).encode())
    return [digest, -digest]


def has_one_digest(agreed: list[int]) -> bool:
    """Whether the last two of the agreed values come from the same facts on all ranks."""
    return agreed[-2] == -agreed[-1]

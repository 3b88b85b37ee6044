"""Ranks that capture in step with each other, so that a failure of one stops all of them soon.

Without it a rank learns of another's failure only when its own session is over. Where collectives
run inside a session (in capture warmup, and in every capture of the CPU recorder), it would wait
for the failed rank before that, in a collective that this one never enters.
"""

from __future__ import annotations

from collections.abc import Hashable

from chunkgraph.engine.decide.reasons import Agree

__all__ = ["Lockstep", "StoppedElsewhere"]


class StoppedElsewhere(Exception):  # noqa: N818
    """Another rank's session failed; this one's ends too. Never leaves the engine."""


class Lockstep:
    """Asks all ranks before each part of a session whether they are still well.

    Ranks have different numbers of graphs: who has made all of its own goes on answering until
    nobody has any left. Ranks whose collectives meet make theirs in the same order.

    Args:
        agree: element-wise maximum over all ranks.

    Attributes:
        bank: what this rank is making graphs of; None where that is no one bank.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._has_ended = False
        self.bank: Hashable | None = None

    def begin(self, bank: Hashable | None) -> None:
        """This rank goes on with the next part of its session.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self._ask(has_failed=False, is_working=True)
        self.bank = bank

    def finish(self) -> None:
        """This rank has made all of its graphs; wait for the others.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self.bank = None
        while not self._has_ended:
            self._ask(has_failed=False, is_working=False)

    def fail(self) -> None:
        """This rank failed; tell the others."""
        if not self._has_ended:
            self._ask(has_failed=True, is_working=False)

    def _ask(self, *, has_failed: bool, is_working: bool) -> None:
        some_failed, some_work = self._agree([int(has_failed), int(is_working)])
        self._has_ended = bool(some_failed) or not some_work
        if some_failed and not has_failed:
            raise StoppedElsewhere

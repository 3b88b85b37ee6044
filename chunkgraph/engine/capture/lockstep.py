"""Capture on all ranks in lockstep, so that a failure of one rank soon stops all of them.

Without it, a rank learns of another's failure only after its own session. If collectives run inside
the session (in capture warmup, and in every capture of the CPU recorder), it would wait forever in
a collective that the failed rank never enters.
"""

from __future__ import annotations

from collections.abc import Hashable

from chunkgraph.engine.decide.reasons import Agree

__all__ = ["Lockstep", "StoppedElsewhere"]


class StoppedElsewhere(Exception):  # noqa: N818
    """Another rank's session failed, so this rank's ends too. Never leaves the engine."""


class Lockstep:
    """Exchange failures between all ranks before each part of a session.

    Ranks have different numbers of graphs: a rank that has captured all of its graphs keeps
    answering until every rank has. Ranks with common collectives capture in the same order.

    Args:
        agree: element-wise maximum over all ranks.

    Attributes:
        bank: the bank whose graphs this rank captures; None if not a single bank.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._has_ended = False
        self.bank: Hashable | None = None

    def begin(self, bank: Hashable | None) -> None:
        """Begin the next part of this rank's session.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self._ask(has_failed=False, is_working=True)
        self.bank = bank

    def finish(self) -> None:
        """Wait for the other ranks, after this rank has captured all of its graphs.

        Raises:
            StoppedElsewhere: another rank failed.
        """
        self.bank = None
        while not self._has_ended:
            self._ask(has_failed=False, is_working=False)

    def fail(self) -> None:
        """Report to the other ranks that this rank failed."""
        if not self._has_ended:
            self._ask(has_failed=True, is_working=False)

    def _ask(self, *, has_failed: bool, is_working: bool) -> None:
        some_failed, some_work = self._agree([int(has_failed), int(is_working)])
        self._has_ended = bool(some_failed) or not some_work
        if some_failed and not has_failed:
            raise StoppedElsewhere

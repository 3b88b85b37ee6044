"""What a bank of a context-parallel size is called by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ContextBank", "ScheduledBanks", "digest_of_plan"]


@dataclass(frozen=True, eq=False, repr=False)
class ContextBank:
    """A bank key: two are one bank only if they hold the very same process group.

    A graph holds the communicator that it was captured with, so that another group of the same
    ranks is another group.

    Attributes:
        size: ranks of the group.
        group: the process group; None for a group of this rank alone.
        num_tokens: rows of a microbatch on one rank.
        variant: whatever else graphs differ by.
        max_packed_seqs: sequences of a microbatch; None: as many as the limits allow.
    """

    size: int
    group: Any
    num_tokens: int
    variant: str = ""
    max_packed_seqs: int | None = None

    @property
    def num_packed_tokens(self) -> int:
        """Rows of a microbatch on all ranks of the group together."""
        return self.size * self.num_tokens

    @property
    def name(self) -> tuple[int, int, str, int | None]:
        """All but the group; the same on all ranks."""
        return (self.size, self.num_tokens, self.variant, self.max_packed_seqs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ContextBank):
            return NotImplemented
        return self.name == other.name and self.group is other.group

    def __hash__(self) -> int:
        return hash((self.name, id(self.group)))

    def __repr__(self) -> str:
        fewer = "" if self.max_packed_seqs is None else f", {self.max_packed_seqs} sequences"
        variant = f", {self.variant}" if self.variant else ""
        return f"CP {self.size} with {self.num_tokens} tokens a rank{fewer}{variant}"


class ScheduledBanks(list[ContextBank]):
    """The banks of one rank's microbatches, and what tells apart the schedule that they are of.

    Args:
        banks: in the order of the microbatches.
        digest: of the schedule, the same on all ranks.
    """

    def __init__(self, banks: Iterable[ContextBank], digest: int) -> None:
        super().__init__(banks)
        self.digest = digest


def digest_of_plan(banks: Sequence[object] | None) -> int:
    """Of the schedule that banks are of; 0 where they were put together without one."""
    return banks.digest if isinstance(banks, ScheduledBanks) else 0

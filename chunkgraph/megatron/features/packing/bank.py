"""What a bank of packed microbatches is called by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkgraph.packing import PackedShape

__all__ = ["PackedBank", "ScheduledBanks", "digest_of_plan"]


@dataclass(frozen=True, eq=False, repr=False)
class PackedBank:
    """A bank key: the context-parallel size, rows and sequences of a microbatch.

    A graph holds the communicator that it was captured with. So two keys are one bank only if they
    hold the very same process group; another group of the same ranks is another group.

    Attributes:
        shape: what microbatches are packed into.
        group: the process group that shares a microbatch, where its size changes; None: this rank
            alone, or the model's own group.
        name: for reports.
    """

    shape: PackedShape
    group: Any = None
    name: str = ""
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, id(self.group))))

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.shape.context_parallel_size

    @property
    def num_tokens(self) -> int:
        """Rows of a microbatch on one rank."""
        return self.shape.tokens_per_rank

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedBank):
            return NotImplemented
        is_alike = self._hash == other._hash and self.shape == other.shape
        return is_alike and self.group is other.group

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self.name or str(self.shape)


class ScheduledBanks(list[PackedBank]):
    """The banks of one rank's microbatches, and what tells apart the schedule that they are of.

    Args:
        banks: in the order of the microbatches.
        digest: of the schedule, the same on all ranks.
    """

    def __init__(self, banks: Iterable[PackedBank], digest: int) -> None:
        super().__init__(banks)
        self.digest = digest


def digest_of_plan(banks: Sequence[object] | None) -> int:
    """Return the digest of the schedule that banks are of; 0 if they are of none."""
    return banks.digest if isinstance(banks, ScheduledBanks) else 0

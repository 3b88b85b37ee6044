"""The options of packed sequences, and the keys of their banks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunkgraph.packing import PackedShape

__all__ = ["PackedBank", "PackingOptions", "ScheduledBanks", "digest_of_plan"]


@dataclass(frozen=True, eq=False, repr=False)
class PackedBank:
    """A bank key: the context-parallel size, rows and sequences of a microbatch.

    A graph contains the communicator of its capture. So two keys are equal only if they have the
    same process group object; another group of the same ranks differs.

    Attributes:
        shape: Shape into which microbatches are packed.
        group: Process group that shares a microbatch, if sizes change; None for this rank alone or
            the model's group.
        name: Name for reports.
    """

    shape: PackedShape
    group: Any = None
    name: str = ""
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shape, id(self.group))))

    @property
    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self.shape.context_parallel_size

    @property
    def num_tokens(self) -> int:
        """Return the rows of a microbatch on one rank."""
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
    """The banks of one rank's microbatches, with a digest that identifies their schedule.

    Args:
        banks: Banks in the order of the microbatches.
        digest: Digest of the schedule, the same on all ranks.
    """

    def __init__(self, banks: Iterable[PackedBank], digest: int) -> None:
        super().__init__(banks)
        self.digest = digest


def digest_of_plan(banks: Sequence[object] | None) -> int:
    """Return the digest of the banks' schedule; 0 without a schedule."""
    return banks.digest if isinstance(banks, ScheduledBanks) else 0


@dataclass(frozen=True)
class PackingOptions:
    """Packed sequences of fixed shapes, the same on every rank.

    Attributes:
        shape: The fixed shape of every microbatch.
        buckets: Shorter lengths that are captured too, as fractions of ``shape``'s length or in
            tokens. A microbatch must then have the rows of the smallest length that holds it
            (`MegatronChunkGraphs.buckets`), in eager steps too.
        seq_buckets: Smaller numbers of sequences that are captured too, for every length. A
            microbatch replays the graphs with the fewest sequences that hold its documents. Its
            offsets may have that number (`MegatronChunkGraphs.packed_shapes`), or the largest; the
            latter are cut, in eager training steps too. None for `default_seq_buckets`.
        fills_rows: Whether documents fill all rows of every microbatch, as in Megatron's data
            sets. Experts then take every row, as without chunk graphs, and a step that fits but
            has free rows is an error; a step that does not fit runs eagerly with any rows.
            Otherwise rows after the documents are kept from experts
            (`keep_padding_from_experts`), and the model takes ``padding_mask``.
    """

    shape: PackedShape
    buckets: Sequence[float] = ()
    seq_buckets: Sequence[int] | None = None
    fills_rows: bool = False

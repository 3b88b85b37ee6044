"""Values of a schedule whose microbatches each have a context-parallel size.

The ranks that share a global batch (data parallel times context parallel: the world) are divided
again in every round into groups of 1, 2, 4, ... neighbours. Each group works on one microbatch, so
every rank has one microbatch per round and the same number per step, which is all that pipelines
need. Long documents go to large groups and short ones to small groups.

`context_scheduler` computes schedules.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from chunkgraph.errors import PackingError
from chunkgraph.packing.shape import PackedShape, reason_not_to_fit

__all__ = ["ContextLimits", "ContextMicrobatch", "ContextSchedule"]


@dataclass(frozen=True, kw_only=True)
class ContextLimits:
    """The limits of every schedule.

    Args:
        world_size: W, the number of ranks that share a global batch, a power of two. Pipeline
            stages and tensor-parallel ranks do not count.
        max_tokens_per_rank: rows of a microbatch on one rank, whatever its group. Even if there are
            groups of several ranks, because each rank holds two pieces of every document.
        max_packed_seqs: N, the sequences of a microbatch, including the empty dummy sequence that
            fills its tail.
        sizes: the group sizes, powers of two up to W; empty: all of them.
        multiple_of: the number of microbatches of a step is a multiple of this. Interleaved
            schedules need their microbatch group size.
        counts_padding: see `PackedShape`.

    Raises:
        PackingError: a size is out of range.
    """

    world_size: int
    max_tokens_per_rank: int
    max_packed_seqs: int
    sizes: tuple[int, ...] = ()
    multiple_of: int = 1
    counts_padding: bool = False

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), *(("sizes", s) for s in self.sizes)):
            if not _is_power_of_two(value):
                raise PackingError(f"{name}: {value!r} is not a power of two.")
        if self.sizes and max(self.sizes) > self.world_size:
            raise PackingError(
                f"sizes: a group of {max(self.sizes)} is larger than the world of "
                f"{self.world_size} ranks."
            )
        if self.multiple_of < 1:
            raise PackingError(f"multiple_of is {self.multiple_of}; it must be at least 1.")
        for size in self.group_sizes:
            self.shape(size)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Return the sizes that groups may have, largest first."""
        powers = [1 << k for k in range(self.world_size.bit_length())]
        return tuple(sorted(set(self.sizes or powers), reverse=True))

    def shape(self, size: int) -> PackedShape:
        """Return the shape of every microbatch of a group of ``size`` ranks."""
        return PackedShape(
            self.max_packed_seqs,
            self.max_tokens_per_rank * size,
            size,
            counts_padding=self.counts_padding,
        )

    def smallest_size(self, length: int) -> int | None:
        """Return the size of the smallest group that holds a document; None if none does."""
        for size in reversed(self.group_sizes):
            if reason_not_to_fit([length], self.shape(size)) is None:
                return size
        return None


@dataclass(frozen=True)
class ContextMicrobatch:
    """The documents that a group of neighbouring ranks works on together.

    Attributes:
        size: the number of ranks in the group.
        first_rank: the group's first rank in the world; the next ``size - 1`` follow.
        documents: indices in the global batch, ascending. Empty for a filler, which keeps the ranks
            in step: they forward one token without a loss.
    """

    size: int
    first_rank: int
    documents: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """Return the group's ranks in the world."""
        return range(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True)
class ContextSchedule:
    """The microbatches of one step.

    Attributes:
        limits: the limits that it keeps.
        rounds: for each round the microbatches that run at the same time, by first rank.
    """

    limits: ContextLimits
    rounds: tuple[tuple[ContextMicrobatch, ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Return the number of microbatches of each rank."""
        return len(self.rounds)

    @property
    def mean_filled_microbatches(self) -> float:
        """Return the number of microbatches that are not fillers, averaged over ranks."""
        filled = [m.size for microbatches in self.rounds for m in microbatches if m.documents]
        return sum(filled) / self.limits.world_size

    @property
    def num_filled_rounds(self) -> int:
        """Return the number of rounds in which at least one rank has a document."""
        return sum(any(m.documents for m in microbatches) for microbatches in self.rounds)

    def of_rank(self, rank: int) -> tuple[ContextMicrobatch, ...]:
        """Return the microbatches of one rank of the world, in order."""
        return tuple(
            next(m for m in microbatches if rank in m.ranks) for microbatches in self.rounds
        )

    @property
    def digest(self) -> int:
        """Return a checksum of the schedule, for ranks to compare."""
        return zlib.crc32(repr(self).encode())


def _is_power_of_two(value: object) -> bool:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_count and int(value).bit_count() == 1  # type: ignore[call-overload]

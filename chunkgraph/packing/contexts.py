"""Which ranks work on which documents: microbatches that each have a context-parallel size.

The ranks that share a global batch (data parallel times context parallel: the world) are cut again
in every round into groups of 1, 2, 4, ... neighbours. Each group works on one microbatch, so that
every rank has one microbatch in each round, and as many in a step as every other rank: pipelines
need no more than that. Long documents go to large groups and short ones to small ones.

Values only; who makes them is in `context_scheduler`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.shape import PackedShape, reason_not_to_fit

__all__ = ["ContextLimits", "ContextMicrobatch", "ContextSchedule"]


@dataclass(frozen=True, kw_only=True)
class ContextLimits:
    """What every schedule keeps to.

    Args:
        world_size: W, the ranks that share a global batch, a power of two; pipeline stages and
            tensor-parallel ranks are not counted.
        max_tokens_per_rank: rows of a microbatch on one rank, whatever its group; even where groups
            have more than one rank, as each rank holds two pieces of every document.
        max_packed_seqs: N, the sequences of a microbatch, the zero-valid dummy that fills its tail
            among them.
        sizes: of the groups, powers of two up to W; empty: all of them.
        max_document_tokens: tokens of one document; None allows what the largest group holds.
        multiple_of: what the number of microbatches of a step is a multiple of (interleaved
            schedules need that of their group size).
        max_microbatches: of a rank in a step; None: no bound.
        counts_padding: see `PackedShape`.

    Raises:
        PackingError: A size is out of its range.
    """

    world_size: int
    max_tokens_per_rank: int
    max_packed_seqs: int
    sizes: tuple[int, ...] = ()
    max_document_tokens: int | None = None
    multiple_of: int = 1
    max_microbatches: int | None = None
    counts_padding: bool = False

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), *(("sizes", s) for s in self.sizes)):
            if not _is_power_of_two(value):
                raise PackingError(f"{name}: {value!r} is no power of two.")
        if self.sizes and max(self.sizes) > self.world_size:
            raise PackingError(
                f"sizes: a group of {max(self.sizes)} is larger than the {self.world_size} ranks "
                "there are."
            )
        if self.multiple_of < 1:
            raise PackingError(f"multiple_of is {self.multiple_of}; it is at least 1.")
        most = self.max_microbatches
        if most is not None and most < self.multiple_of:
            raise PackingError(
                f"max_microbatches is {most}, below multiple_of, which is {self.multiple_of}."
            )
        for size in self.group_sizes:
            self.shape(size)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes that groups may have, largest first."""
        every = [1 << k for k in range(self.world_size.bit_length())]
        return tuple(sorted(set(self.sizes or every), reverse=True))

    def shape(self, size: int) -> PackedShape:
        """The shape of all microbatches of groups of ``size``; its N counts the dummy."""
        tokens = self.max_tokens_per_rank * size
        limit = self.max_document_tokens
        return PackedShape(
            self.max_packed_seqs,
            tokens,
            size,
            None if limit is None else min(limit, tokens),
            self.counts_padding,
        )

    def smallest_size(self, length: int) -> int | None:
        """The smallest group that holds a document, or None when none does."""
        for size in reversed(self.group_sizes):
            if reason_not_to_fit([length], self.shape(size)) is None:
                return size
        return None

    def num_slots(self, num_slots: Sequence[int]) -> tuple[int, ...]:
        """Slots of each chunk that microbatches of any one bank can ever take at once.

        Args:
            num_slots: of each chunk, for any number of microbatches.
        """
        most = self.max_microbatches
        return tuple(count if most is None else min(count, most) for count in num_slots)


@dataclass(frozen=True)
class ContextMicrobatch:
    """Documents that a group of neighbouring ranks works on together.

    Attributes:
        size: of the group.
        first_rank: in the world; the group is this rank and the next ``size - 1``.
        documents: rising places in the global batch. Empty: a filler, which only keeps the ranks
            in step: they forward one token without a loss.
    """

    size: int
    first_rank: int
    documents: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The group, in the world."""
        return range(self.first_rank, self.first_rank + self.size)


@dataclass(frozen=True)
class ContextSchedule:
    """The microbatches of one step.

    Attributes:
        limits: that it keeps to.
        rounds: each has the microbatches that run next to each other, by rank.
    """

    limits: ContextLimits
    rounds: tuple[tuple[ContextMicrobatch, ...], ...]

    @property
    def num_microbatches(self) -> int:
        """Of every rank."""
        return len(self.rounds)

    @property
    def mean_filled_microbatches(self) -> float:
        """Those that are no fillers, in the mean over the ranks."""
        filled = [m.size for microbatches in self.rounds for m in microbatches if m.documents]
        return sum(filled) / self.limits.world_size

    @property
    def num_filled_rounds(self) -> int:
        """Those in which some rank has a document."""
        return sum(any(m.documents for m in microbatches) for microbatches in self.rounds)

    def of_rank(self, rank: int) -> tuple[ContextMicrobatch, ...]:
        """The microbatches of one rank of the world, in their order."""
        return tuple(
            next(m for m in microbatches if rank in m.ranks) for microbatches in self.rounds
        )

    @property
    def digest(self) -> int:
        """A number that tells apart schedules, for ranks to compare."""
        return zlib.crc32(repr(self).encode())

    def check(self, lengths: Sequence[int]) -> None:
        """Make sure that the schedule is one of these documents and keeps to its limits.

        Args:
            lengths: Tokens of each document of the global batch.

        Raises:
            PackingError: naming the round and the rank.
        """
        limits = self.limits
        for number, microbatches in enumerate(self.rounds):
            covered = [rank for m in microbatches for rank in m.ranks]
            if covered != list(range(limits.world_size)):
                raise PackingError(
                    f"round {number}: the groups have the ranks {covered}, not each of the "
                    f"{limits.world_size} once and in order."
                )
            for m in microbatches:
                self._check_microbatch(f"round {number}, rank {m.first_rank}: ", m, lengths)
        placed = Counter(
            d for microbatches in self.rounds for m in microbatches for d in m.documents
        )
        wrong = [d for d in range(len(lengths)) if placed[d] != 1]
        if wrong or len(placed) != len(lengths):
            named = wrong or sorted(placed.keys() - set(range(len(lengths))))
            raise PackingError(f"documents {named[:5]} are not in exactly one microbatch.")
        count, most = self.num_microbatches, limits.max_microbatches
        if count % limits.multiple_of or (most is not None and count > most):
            raise PackingError(
                f"{count} microbatches a rank: it is to be a multiple of {limits.multiple_of} and "
                f"at most {'any' if most is None else most}. Take fewer documents in a step, or "
                "allow more tokens on a rank."
            )

    def _check_microbatch(self, where: str, m: ContextMicrobatch, lengths: Sequence[int]) -> None:
        if m.size not in self.limits.group_sizes or m.first_rank % m.size:
            raise PackingError(
                f"{where}a group of {m.size}; groups have one of the sizes "
                f"{list(self.limits.group_sizes)} and begin at a multiple of it."
            )
        if list(m.documents) != sorted(m.documents):
            raise PackingError(f"{where}documents {list(m.documents)} are not in order.")
        if not m.documents:
            return
        unknown = [d for d in m.documents if not 0 <= d < len(lengths)]
        if unknown:
            raise PackingError(f"{where}there are no documents {unknown}.")
        own = check_lengths([lengths[d] for d in m.documents], where)
        reason = reason_not_to_fit(own, self.limits.shape(m.size))
        if reason is not None:
            raise PackingError(f"{where}{reason.value} for a group of {m.size}.")


def _is_power_of_two(value: object) -> bool:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_count and int(value).bit_count() == 1  # type: ignore[call-overload]

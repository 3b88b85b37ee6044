"""Distribute a global batch over microbatches that each have a context-parallel size.

The ranks that share a global batch (data parallel times context parallel: the world) are divided
again in every round into groups of 1, 2, 4, ... neighbours. Each group works on one microbatch, so
every rank has one microbatch per round and the same number per step, which is all that pipelines
need. Long documents go to large groups and short ones to small groups.

Everything here depends on lengths and limits alone, so ranks that read the same lengths compute the
same schedule without communication.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.shape import PackedShape, reason_not_to_fit


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


def schedule_contexts(
    lengths: Sequence[int],
    limits: ContextLimits,
    scheduler: Callable[[Sequence[int], ContextLimits], ContextSchedule] | None = None,
) -> ContextSchedule:
    """Schedule a global batch.

    Args:
        lengths: tokens of each document.
        limits: the limits that the schedule keeps.
        scheduler: the scheduler; None: `SmallestSizes`.

    Raises:
        PackingError: there is no document, or one fits no group.
    """
    tokens = [int(length) for length in check_lengths(lengths)]
    for place, length in enumerate(tokens):
        if limits.smallest_size(length) is None:
            largest = limits.group_sizes[0]
            raise PackingError(
                f"document {place} has {length} tokens, but the largest group (of {largest}) holds "
                f"only {limits.shape(largest).max_packed_tokens}. Truncate or split it, or raise "
                "max_tokens_per_rank."
            )
    return (scheduler or SmallestSizes())(tokens, limits)


@dataclass(frozen=True)
class _Load:
    """A microbatch that is not assigned to a round yet."""

    size: int
    documents: tuple[tuple[int, int], ...]
    """(index in the global batch, tokens), longest first."""

    @property
    def cost(self) -> float:
        """Return the relative cost of attention on one rank."""
        return sum(length * length for _, length in self.documents) / self.size

    @property
    def order(self) -> tuple[int, float, tuple[tuple[int, int], ...]]:
        """Return a sort key: largest groups first, then similar costs next to each other."""
        return (-self.size, -self.cost, self.documents)

    def halves(self) -> tuple[_Load, _Load]:
        """Split the documents into two loads of about half the cost each."""
        one = two = replace(self, documents=())
        for document in self.documents:
            if one.cost <= two.cost:
                one = replace(one, documents=(*one.documents, document))
            else:
                two = replace(two, documents=(*two.documents, document))
        return one, two


@dataclass(frozen=True)
class SmallestSizes:
    """Put every document in the smallest group that holds it, packed first fit, longest first.

    Ranks that would have no work in the last rounds get some: the costliest microbatch is split in
    two or, if it has one document, moved to a larger group. Fillers take what is left over. So no
    round starts with ranks that could have worked on another's documents.
    """

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """Schedule documents that each fit the largest group."""
        loads = _pack_loads(lengths, limits)
        world = limits.world_size
        num_busy = sum(load.size for load in loads)
        num_rounds = -(-num_busy // (world * limits.multiple_of)) * limits.multiple_of
        num_free = num_rounds * world - num_busy
        while num_free:
            loads, num_used = _use_free_ranks(loads, num_free, limits)
            num_free -= num_used
        return _fill_rounds(sorted(loads, key=lambda load: load.order), limits)


def _pack_loads(lengths: Sequence[int], limits: ContextLimits) -> list[_Load]:
    """Pack each document first fit among those with the same smallest group."""
    by_size: dict[int, list[tuple[int, int]]] = {}
    for place, length in enumerate(lengths):
        size = limits.smallest_size(length)
        assert size is not None
        by_size.setdefault(size, []).append((place, length))
    return [
        _Load(size, tuple(documents))
        for size, waiting in sorted(by_size.items())
        for documents in first_fit(waiting, limits.shape(size))
    ]


def _use_free_ranks(
    loads: list[_Load], free: int, limits: ContextLimits
) -> tuple[list[_Load], int]:
    """Give work to some of the ``free`` ranks; return the new loads and how many ranks it took."""
    by_cost = sorted(loads, key=lambda load: (-load.cost, load.order))
    for load in by_cost:
        rest = [other for other in loads if other is not load]
        if len(load.documents) > 1 and load.size <= free:
            return [*rest, *load.halves()], load.size
        larger = [size for size in limits.group_sizes if size > load.size]
        if len(load.documents) == 1 and larger and larger[-1] - load.size <= free:
            return [*rest, replace(load, size=larger[-1])], larger[-1] - load.size
    size = next(size for size in limits.group_sizes if size <= free)
    return [*loads, _Load(size, ())], size


def _fill_rounds(loads: Sequence[_Load], limits: ContextLimits) -> ContextSchedule:
    """Fill rounds with loads, largest first, so that each begins at a multiple of its size."""
    rounds: list[tuple[ContextMicrobatch, ...]] = []
    current: list[ContextMicrobatch] = []
    first = 0
    for load in loads:
        documents = tuple(sorted(place for place, _ in load.documents))
        current.append(ContextMicrobatch(load.size, first, documents))
        first += load.size
        if first == limits.world_size:
            rounds.append(tuple(current))
            current, first = [], 0
    assert not current, "sizes are powers of two and fill the rounds"
    return ContextSchedule(limits, tuple(rounds))


def first_fit(
    documents: Iterable[tuple[int, int]], shape: PackedShape
) -> list[list[tuple[int, int]]]:
    """Put each document in the first microbatch that has room, longest document first.

    Args:
        documents: (index, tokens) of each document; none is longer than the shape allows.
        shape: the shape that every microbatch fits.

    Returns:
        The documents of each microbatch, longest first.
    """
    microbatches: list[list[tuple[int, int]]] = []
    free_rows: list[int] = []
    # Full microbatches are not searched again.
    open_indices: list[int] = []
    for place, length in sorted(documents, key=lambda document: (-document[1], document[0])):
        rows = shape.padded_length(length)
        chosen = next((index for index in open_indices if free_rows[index] >= rows), None)
        if chosen is None:
            chosen = len(microbatches)
            microbatches.append([])
            free_rows.append(shape.max_packed_tokens)
            open_indices.append(chosen)
        microbatches[chosen].append((place, length))
        free_rows[chosen] -= rows
        if free_rows[chosen] == 0 or len(microbatches[chosen]) == shape.max_documents:
            open_indices.remove(chosen)
    return microbatches


def _is_power_of_two(value: object) -> bool:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return is_count and int(value).bit_count() == 1  # type: ignore[call-overload]

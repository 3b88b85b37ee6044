"""Distribute a global batch over microbatches that each have a context-parallel size.

Everything here depends on lengths and limits alone, so ranks that read the same lengths compute the
same schedule without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from chunkgraph.errors import PackingError
from chunkgraph.packing.contexts import ContextLimits, ContextMicrobatch, ContextSchedule
from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.shape import PackedShape

__all__ = ["SmallestSizes", "first_fit", "schedule_contexts"]


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
    tokens = [int(length) for length in check_lengths(lengths, "the global batch")]
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

"""From the documents of a global batch to microbatches with a context-parallel size each.

Everything here is a function of lengths and limits alone, so that ranks which read the same lengths
find the same schedule without a word between them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from chunkgraph.errors import PackingError
from chunkgraph.packing.contexts import ContextLimits, ContextMicrobatch, ContextSchedule
from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.schedule import first_fit

__all__ = [
    "ContextScheduler",
    "ForcedSizes",
    "RandomSizes",
    "SmallestSizes",
    "schedule_contexts",
    "scheduler_of",
]


class ContextScheduler(Protocol):
    """Makes the schedule of one step."""

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """Schedule documents that each fit the largest group; the result is checked."""


def schedule_contexts(
    lengths: Sequence[int], limits: ContextLimits, scheduler: ContextScheduler | None = None
) -> ContextSchedule:
    """Schedule a global batch.

    Args:
        lengths: Tokens of each document.
        limits: That the result keeps to.
        scheduler: Default `SmallestSizes`.

    Raises:
        PackingError: There is no document, one fits no group, or the scheduler's result breaks a
            rule, such as having more microbatches than allowed.
    """
    tokens = [int(length) for length in check_lengths(lengths, "the global batch")]
    for place, length in enumerate(tokens):
        if limits.smallest_size(length) is None:
            largest = limits.shape(limits.group_sizes[0])
            raise PackingError(
                f"document {place} has {length} tokens, and the largest group (of "
                f"{largest.context_parallel_size}) holds {largest.document_limit}. Truncate or "
                "split it, or allow more tokens on a rank."
            )
    schedule = (scheduler or SmallestSizes())(tokens, limits)
    schedule.check(tokens)
    return schedule


@dataclass(frozen=True)
class _Load:
    """A microbatch that has no place yet."""

    size: int
    documents: tuple[tuple[int, int], ...]
    """(place, tokens), longest first."""

    @property
    def cost(self) -> float:
        """Of one rank's attention, to compare."""
        return sum(length * length for _, length in self.documents) / self.size

    @property
    def order(self) -> tuple[int, float, tuple[tuple[int, int], ...]]:
        """Largest groups first, and in a round what takes about as long."""
        return (-self.size, -self.cost, self.documents)

    def parts(self) -> tuple[_Load, _Load]:
        """Two of about half the cost."""
        one = two = replace(self, documents=())
        for document in self.documents:
            if one.cost <= two.cost:
                one = replace(one, documents=(*one.documents, document))
            else:
                two = replace(two, documents=(*two.documents, document))
        return one, two


@dataclass(frozen=True)
class SmallestSizes:
    """Every document in the smallest group that holds it, packed first fit, longest first.

    Ranks that this leaves without work in the last rounds get some: the costliest microbatch is
    split in two, or, if it has one document, given to a larger group; what is then left over are
    fillers. So no round is begun for ranks that would have nothing to do.
    """

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """See `ContextScheduler`."""
        loads = _packed(lengths, limits)
        world = limits.world_size
        num_taken = sum(load.size for load in loads)
        num_rounds = -(-num_taken // (world * limits.multiple_of)) * limits.multiple_of
        free = num_rounds * world - num_taken
        while free:
            loads, used = _with_more_ranks(loads, free, limits)
            free -= used
        return _placed(sorted(loads, key=lambda load: load.order), limits)


@dataclass(frozen=True)
class ForcedSizes:
    """Groups of given sizes, one size a round, over and over: to try and to measure banks.

    Attributes:
        sizes: of the groups of each round.
        documents_each: that a microbatch takes at most.

    Raises:
        PackingError: when called: A document fits none of the groups.
    """

    sizes: tuple[int, ...]
    documents_each: int = 1

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """See `ContextScheduler`."""
        waiting = list(enumerate(lengths))
        too_long = [p for p, n in waiting if (limits.smallest_size(n) or 0) > max(self.sizes)]
        if too_long:
            raise PackingError(f"documents {too_long[:5]} need more than {max(self.sizes)} ranks.")
        rounds: list[tuple[ContextMicrobatch, ...]] = []
        sizes = itertools.cycle(self.sizes)
        while waiting or len(rounds) % limits.multiple_of:
            size = next(sizes)
            microbatches = []
            for first in range(0, limits.world_size, size):
                taken = _taken(waiting, limits, size, self.documents_each)
                waiting = [document for document in waiting if document not in taken]
                microbatches.append(ContextMicrobatch(size, first, tuple(p for p, _ in taken)))
            rounds.append(tuple(microbatches))
        return ContextSchedule(limits, tuple(rounds))


@dataclass(frozen=True)
class RandomSizes:
    """Groups of one size in each round, in random order: each size once before one comes again.

    Attributes:
        seed: of the order; give each step its own, the same on all ranks.
        documents_each: that a microbatch takes at most.
    """

    seed: str
    documents_each: int = 1

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """See `ContextScheduler`."""
        rng = random.Random(self.seed)
        # As many turns of all sizes as there are documents: in each the longest is placed.
        turns = [rng.sample(limits.group_sizes, len(limits.group_sizes)) for _ in lengths]
        sizes = tuple(size for turn in turns for size in turn)
        return ForcedSizes(sizes, self.documents_each)(lengths, limits)


def scheduler_of(
    name: Literal["smallest", "random"], limits: ContextLimits, seed: str
) -> ContextScheduler:
    """Return the scheduler that settings name.

    Args:
        name: which size a microbatch gets.
        limits: that the schedules keep to.
        seed: of random sizes; see `RandomSizes`.
    """
    return SmallestSizes() if name == "smallest" else RandomSizes(seed, limits.max_packed_seqs - 1)


def _taken(
    waiting: Sequence[tuple[int, int]], limits: ContextLimits, size: int, most: int
) -> list[tuple[int, int]]:
    """The first documents that one microbatch holds together."""
    shape = limits.shape(size)
    taken: list[tuple[int, int]] = []
    rows = 0
    for place, length in waiting:
        has_room = rows + shape.padded_length(length) <= shape.max_packed_tokens
        if len(taken) < min(most, shape.max_documents) and (
            has_room and length <= shape.document_limit
        ):
            taken.append((place, length))
            rows += shape.padded_length(length)
    return taken


def _packed(lengths: Sequence[int], limits: ContextLimits) -> list[_Load]:
    of_size: dict[int, list[tuple[int, int]]] = {}
    for place, length in enumerate(lengths):
        size = limits.smallest_size(length)
        assert size is not None
        of_size.setdefault(size, []).append((place, length))
    return [
        _Load(size, tuple(documents))
        for size, waiting in sorted(of_size.items())
        for documents in first_fit(waiting, limits.shape(size))
    ]


def _with_more_ranks(
    loads: list[_Load], free: int, limits: ContextLimits
) -> tuple[list[_Load], int]:
    """The loads with some of the ``free`` ranks put to use, and how many of them."""
    by_cost = sorted(loads, key=lambda load: (-load.cost, load.order))
    for load in by_cost:
        rest = [other for other in loads if other is not load]
        if len(load.documents) > 1 and load.size <= free:
            return [*rest, *load.parts()], load.size
        larger = [size for size in limits.group_sizes if size > load.size]
        if len(load.documents) == 1 and larger and larger[-1] - load.size <= free:
            return [*rest, replace(load, size=larger[-1])], larger[-1] - load.size
    size = next(size for size in limits.group_sizes if size <= free)
    return [*loads, _Load(size, ())], size


def _placed(loads: Sequence[_Load], limits: ContextLimits) -> ContextSchedule:
    """Side by side, largest first: so every group begins at a multiple of its size."""
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

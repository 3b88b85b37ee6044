"""Schedulers that force context-parallel sizes, to exercise banks of graphs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from chunkgraph.errors import PackingError
from chunkgraph.packing import ContextLimits, ContextMicrobatch, ContextSchedule


@dataclass(frozen=True)
class ForcedSizes:
    """Use one group size per round, cycling through a list: to exercise and measure banks.

    Attributes:
        sizes: the group size of each round; repeated as needed.
        documents_each: most documents of a microbatch.

    Raises:
        PackingError: when called, if a document fits none of the groups.
    """

    sizes: tuple[int, ...]
    documents_each: int = 1

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """Schedule a global batch; see `schedule_contexts`."""
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
                batch = _first_documents(waiting, limits, size, self.documents_each)
                waiting = [document for document in waiting if document not in batch]
                microbatches.append(ContextMicrobatch(size, first, tuple(p for p, _ in batch)))
            rounds.append(tuple(microbatches))
        return ContextSchedule(limits, tuple(rounds))


@dataclass(frozen=True)
class RandomSizes:
    """Use one group size per round in random order, each size once before one repeats.

    Attributes:
        seed: the seed of the order. Use another one for each step, the same on all ranks.
        documents_each: most documents of a microbatch.
    """

    seed: str
    documents_each: int = 1

    def __call__(self, lengths: Sequence[int], limits: ContextLimits) -> ContextSchedule:
        """Schedule a global batch; see `schedule_contexts`."""
        rng = random.Random(self.seed)
        # Every turn of all sizes places at least one document.
        turns = [rng.sample(limits.group_sizes, len(limits.group_sizes)) for _ in lengths]
        sizes = tuple(size for turn in turns for size in turn)
        return ForcedSizes(sizes, self.documents_each)(lengths, limits)


def _first_documents(
    waiting: Sequence[tuple[int, int]], limits: ContextLimits, size: int, most: int
) -> list[tuple[int, int]]:
    """Return the first documents that fit together in one microbatch, at most ``most``."""
    shape = limits.shape(size)
    documents: list[tuple[int, int]] = []
    rows = 0
    for place, length in waiting:
        has_room = rows + shape.padded_length(length) <= shape.max_packed_tokens
        if len(documents) < min(most, shape.max_documents) and (
            has_room and length <= shape.max_packed_tokens
        ):
            documents.append((place, length))
            rows += shape.padded_length(length)
    return documents

"""Schedulers that force context-parallel sizes, to exercise banks of graphs, and their check."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


def packing_of(
    sizes: Sequence[int],
    rows: int,
    *,
    schedule: str = "random",
    captured: Sequence[int] = (),
    seq_buckets: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the section ``packing`` of a case, with ``rows`` rows per rank."""
    return {
        "max_packed_seqs": 8,
        "max_packed_tokens": rows,
        "context_parallel_sizes": list(sizes),
        "context_parallel_schedule": schedule,
        "captured_context_parallel_sizes": list(captured),
        "seq_buckets": list(seq_buckets),
    }


def check_sizes(name: str, result: dict[str, Any], case: dict[str, Any]) -> None:
    """Check that steps are eager only before the capture and for sizes without graphs."""
    packing, steps = case["config"]["packing"], result["steps"]
    rows, sizes = packing["max_packed_tokens"], packing["context_parallel_sizes"]
    captured = set(packing["captured_context_parallel_sizes"] or sizes)
    is_warm = False
    for step in steps:
        has_graphs = {size for rank in step["context_sizes"] for size in rank} <= captured
        expected = {} if has_graphs else {"no graphs of a bank": 1}
        if has_graphs and not is_warm:
            expected, is_warm = {"capture warmup": 1}, True
        assert step["fallbacks"] == expected, f"{name}: {step}"
    names = {size: f"CP {size} with {rows} tokens a rank" for size in captured}
    assert set().union(*result["replays_of_bank"]) == set(names.values()), name
    for rank, replayed in enumerate(result["replays_of_bank"]):
        replays: Counter[str] = Counter()
        for step in steps:
            if not step["fallbacks"]:
                replays.update(names[size] for size in step["context_sizes"][rank])
        num_chunks = len(result["slots_per_chunk"][0])
        expected_replays = {bank: num_chunks * count for bank, count in replays.items()}
        assert replayed == expected_replays, f"{name}, rank {rank}"

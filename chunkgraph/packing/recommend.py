"""Candidate shapes for a dataset, and the one to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chunkgraph.packing.fallback import ShapeOutcome, allowed_misfits, evaluate, fits
from chunkgraph.packing.microbatches import MicrobatchSizes
from chunkgraph.packing.shape import PackedShape

__all__ = ["Recommendation", "quantile", "recommend"]

_QUANTILES = (0.5, 0.9, 0.99)
# Token capacities are rounded to this part of the largest: finer ones are no other choice.
_TOKEN_PARTS = 32
# A shape this much wasteful than the best is as good, if it needs fewer sequences.
_EQUAL_WASTE = 0.01


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Every shape that was looked at, and the best that meets the target."""

    outcomes: tuple[ShapeOutcome, ...]
    """Sorted by tokens, then by sequences."""
    best: ShapeOutcome | None
    """None when no shape with this capacity meets the target."""
    num_allowed_misfits: int
    """Misfits that the target allows; 0 when there are too few microbatches to tell it from 0."""


def quantile(values: NDArray[np.int64], q: float) -> int:
    """The smallest of the values that at least a share ``q`` of them does not exceed."""
    return int(np.quantile(values, q, method="inverted_cdf"))


def recommend(
    sizes: MicrobatchSizes,
    capacity: PackedShape,
    *,
    microbatches_per_step: int,
    target: float,
    wanted_seqs: Sequence[int] = (),
) -> Recommendation:
    """Look at shapes up to a capacity, and choose one.

    For every token capacity the fewest sequences that meet the target are a candidate, besides
    powers of two. Among these fewest, one for each capacity, the least padding wins; where that is
    within one percentage point, the fewest sequences; then the fewest tokens.

    Args:
        sizes: The dataset's microbatches.
        capacity: Largest tokens to look at, and the context-parallel size; its N is not used.
        microbatches_per_step: Of all data-parallel ranks together.
        target: Share of steps that may fall back, 0 to 1.
        wanted_seqs: Values of N to look at besides.
    """
    budget = allowed_misfits(target, len(sizes), microbatches_per_step)
    shapes = {
        replace(shape, max_packed_seqs=num_seqs)
        for shape in _token_candidates(sizes, capacity)
        for num_seqs in _sequence_candidates(sizes, shape, budget, wanted_seqs)
    }
    outcomes = tuple(
        evaluate(sizes, shape, microbatches_per_step)
        for shape in sorted(shapes, key=lambda s: (s.max_packed_tokens, s.max_packed_seqs))
    )
    best = _best(outcome for outcome in outcomes if outcome.fallback_share <= target)
    return Recommendation(outcomes=outcomes, best=best, num_allowed_misfits=budget)


def _token_candidates(sizes: MicrobatchSizes, capacity: PackedShape) -> list[PackedShape]:
    """The capacity, and smaller ones that most microbatches fit, with room for any N."""
    multiple, largest = capacity.document_multiple, capacity.max_packed_tokens
    unit = multiple * max(1, largest // _TOKEN_PARTS // multiple)
    tokens = {min(largest, -(-quantile(sizes.num_rows, q) // unit) * unit) for q in _QUANTILES}
    limit = capacity.max_document_tokens
    return [
        replace(
            capacity,
            max_packed_seqs=int(sizes.num_documents.max()) + 1,
            max_packed_tokens=count,
            max_document_tokens=None if limit is None else min(limit, count),
        )
        for count in sorted(tokens | {largest})
    ]


def _sequence_candidates(
    sizes: MicrobatchSizes, roomy: PackedShape, budget: int, wanted: Sequence[int]
) -> set[int]:
    candidates = set(wanted)
    median = quantile(sizes.num_documents, 0.5)
    size = 2
    while size < 2 * roomy.max_packed_seqs:
        # Below the median half of all microbatches would fall back.
        if size > median:
            candidates.add(size)
        size *= 2
    fewest = _fewest_sequences(sizes, roomy, budget)
    return candidates if fewest is None else candidates | {fewest}


def _fewest_sequences(sizes: MicrobatchSizes, roomy: PackedShape, budget: int) -> int | None:
    """The smallest N with no more misfits than the budget, or None when the tokens use it up."""
    has_room = fits(sizes, roomy)
    left = budget - int((~has_room).sum())
    if left < 0:
        return None
    counts = np.sort(sizes.num_documents[has_room])[::-1]
    return int(counts[left]) + 1 if left < len(counts) else 2


def _best(outcomes: Iterable[ShapeOutcome]) -> ShapeOutcome | None:
    """The best of those that meet the target, sorted by sequences within a token capacity."""
    # A larger N than the fewest only makes padding look different: other steps are replayed.
    fewest: dict[int, ShapeOutcome] = {}
    for outcome in outcomes:
        fewest.setdefault(outcome.shape.max_packed_tokens, outcome)
    usable = [(o.padding_waste, o) for o in fewest.values() if o.padding_waste is not None]
    if not usable:
        return None
    least = min(waste for waste, _ in usable)
    return min(
        (outcome for waste, outcome in usable if waste <= least + _EQUAL_WASTE),
        key=lambda o: (o.shape.max_packed_seqs, o.shape.max_packed_tokens),
    )

"""Evaluate candidate shapes for a dataset and recommend one.

The microbatches are those that a data path without the limits of graphs makes of the documents. An
evaluation estimates how many steps run eagerly and how many rows are padding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.seq_counts import num_launched
from chunkgraph.packing.shape import PackedShape

_QUANTILES = (0.5, 0.9, 0.99)
# Token capacities are rounded up to this fraction of the largest; finer ones hardly differ.
_TOKEN_PARTS = 32
# A shape with this much more waste than the best is as good if it needs fewer sequences.
_EQUAL_WASTE = 0.01
_BLOCK = 1 << 16


@dataclass(frozen=True, eq=False, kw_only=True)
class MicrobatchSizes:
    """The sizes that decide whether microbatches fit a shape; each int64 [microbatches]."""

    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    """Tokens, with the padding of each document that context parallelism adds."""
    longest: NDArray[np.int64]
    """Tokens of the longest document."""

    def __len__(self) -> int:
        return len(self.num_documents)


def quantile(values: NDArray[np.int64], q: float) -> int:
    """Return the smallest value that at least a share ``q`` of the values does not exceed."""
    return int(np.quantile(values, q, method="inverted_cdf"))


def pack_in_order(lengths: NDArray[np.int64], shape: PackedShape) -> NDArray[np.int64]:
    """Fill microbatches with documents in order; each ends before the first that has no room.

    Only the shape's tokens limit a microbatch, not its sequences, as in a data path without
    graphs. A document with more rows than the capacity gets its own microbatch.

    Args:
        lengths: tokens of each document, int64 [documents].
        shape: the capacity in tokens, and the context parallelism that pads documents.

    Returns:
        The end of each microbatch, int64 [microbatches], as the number of documents up to there.

    Raises:
        PackingError: there is no document, or one has less than one token.
    """
    rows = shape.padded_lengths(check_lengths(lengths))
    row_ends = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(rows, out=row_ends[1:])
    ends: list[int] = []
    place = 0
    # One search for a block of possible beginnings is much faster than one per microbatch.
    for begin in range(0, len(rows), _BLOCK):
        block = row_ends[begin : min(begin + _BLOCK, len(rows))]
        reach = np.searchsorted(row_ends, block + shape.max_packed_tokens, side="right") - 1
        following = np.maximum(reach, np.arange(begin, begin + len(block)) + 1).tolist()
        while place < begin + len(block):
            place = following[place - begin]
            ends.append(place)
    return np.array(ends, dtype=np.int64)


def sizes_of(
    lengths: NDArray[np.int64], ends: NDArray[np.int64], shape: PackedShape
) -> MicrobatchSizes:
    """Return the sizes of microbatches.

    Args:
        lengths: tokens of each document, int64 [documents].
        ends: end of each microbatch, as `pack_in_order` returns them.
        shape: the context parallelism that pads documents.
    """
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    return MicrobatchSizes(
        num_documents=ends - starts,
        num_tokens=np.add.reduceat(lengths, starts),
        num_rows=np.add.reduceat(shape.padded_lengths(lengths), starts),
        longest=np.maximum.reduceat(lengths, starts),
    )


@dataclass(frozen=True, kw_only=True)
class ShapeOutcome:
    """Estimates for training with one shape."""

    shape: PackedShape
    num_misfits: int
    """Number of the dataset's microbatches that do not fit."""
    fallback_share: float
    """Share of steps with such a microbatch, 0 to 1; they run eagerly."""
    padding_waste: float | None
    """Share of rows without a token among replayed microbatches; None when no microbatch fits."""
    bucketed_waste: float | None
    """The same if the shape's default length buckets are captured too."""


def fallback_share(num_misfits: int, num_microbatches: int, microbatches_per_step: int) -> float:
    """Return the expected share of steps with a misfit, drawing microbatches without replacement.

    Args:
        num_misfits: microbatches of the dataset that do not fit.
        num_microbatches: all microbatches of the dataset.
        microbatches_per_step: microbatches of a step on all data-parallel ranks together; one
            misfit among them makes the step eager. Limited to ``num_microbatches``.
    """
    drawn = min(microbatches_per_step, num_microbatches)
    if num_misfits == 0:
        return 0.0
    if num_misfits > num_microbatches - drawn:
        return 1.0
    # The probability that every draw, one after the other, takes a microbatch that fits.
    left = num_microbatches - np.arange(drawn, dtype=np.float64)
    return float(-np.expm1(np.log1p(-num_misfits / left).sum()))


def allowed_misfits(target: float, num_microbatches: int, microbatches_per_step: int) -> int:
    """Return the most misfits for which the fallback share is at most ``target``."""

    def share(num_misfits: int) -> float:
        return fallback_share(num_misfits, num_microbatches, microbatches_per_step)

    return bisect_right(range(num_microbatches + 1), target, key=share) - 1


def fits(sizes: MicrobatchSizes, shape: PackedShape) -> NDArray[np.bool_]:
    """Return which microbatches fit a shape, bool [microbatches]; as `reason_not_to_fit`."""
    fitting: NDArray[np.bool_] = (
        (sizes.longest <= shape.max_packed_tokens)
        & (sizes.num_documents <= shape.max_documents)
        & (sizes.num_rows <= shape.max_packed_tokens)
    )
    return fitting


def padding_waste(sizes: MicrobatchSizes, shapes: Sequence[PackedShape]) -> float | None:
    """Return the share of rows without a token, each microbatch in the smallest shape it fits.

    Microbatches that fit no shape run eagerly and do not count. None if no microbatch fits.
    """
    capacity = np.zeros(len(sizes), dtype=np.int64)
    for shape in sorted(shapes, key=lambda s: s.max_packed_tokens, reverse=True):
        capacity[fits(sizes, shape)] = shape.max_packed_tokens
    num_rows = int(capacity.sum())
    if num_rows == 0:
        return None
    return 1.0 - int(sizes.num_tokens[capacity > 0].sum()) / num_rows


def evaluate(
    sizes: MicrobatchSizes, shape: PackedShape, microbatches_per_step: int
) -> ShapeOutcome:
    """Estimate training on these microbatches with this shape."""
    num_misfits = int((~fits(sizes, shape)).sum())
    return ShapeOutcome(
        shape=shape,
        num_misfits=num_misfits,
        fallback_share=fallback_share(num_misfits, len(sizes), microbatches_per_step),
        padding_waste=padding_waste(sizes, [shape]),
        bucketed_waste=padding_waste(sizes, shape.buckets()),
    )


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The candidate shapes, and the best one that meets the target."""

    outcomes: tuple[ShapeOutcome, ...]
    """Sorted by tokens, then by sequences."""
    best: ShapeOutcome | None
    """None if no shape with this capacity meets the target."""
    num_allowed_misfits: int
    """Misfits that the target allows; 0 if one misfit among so few microbatches exceeds it."""


def recommend(
    sizes: MicrobatchSizes,
    capacity: PackedShape,
    *,
    microbatches_per_step: int,
    target: float,
) -> Recommendation:
    """Evaluate shapes up to a capacity, and choose one.

    The candidates of a token capacity are powers of two and the fewest sequences that meet the
    target. The best is chosen among the fewest of each capacity: the least padding wins; within
    one percentage point the fewest sequences; then the fewest tokens. Its N is raised as far as
    attention's kernels take no longer.

    Args:
        sizes: the dataset's microbatches.
        capacity: the largest token capacity, and the context-parallel size; its N is not used.
        microbatches_per_step: microbatches of a step on all data-parallel ranks together.
        target: the largest acceptable share of eager steps, 0 to 1.
    """
    budget = allowed_misfits(target, len(sizes), microbatches_per_step)
    shapes = {
        replace(shape, max_packed_seqs=num_seqs)
        for shape in _token_candidates(sizes, capacity)
        for num_seqs in _sequence_candidates(sizes, shape, budget)
    }
    outcomes = {shape: evaluate(sizes, shape, microbatches_per_step) for shape in shapes}
    best = _best(o for o in _sorted(outcomes.values()) if o.fallback_share <= target)
    if best is not None:
        num_seqs = num_launched(best.shape.max_packed_seqs)
        shape = replace(best.shape, max_packed_seqs=num_seqs)
        best = outcomes.setdefault(shape, evaluate(sizes, shape, microbatches_per_step))
    return Recommendation(
        outcomes=tuple(_sorted(outcomes.values())), best=best, num_allowed_misfits=budget
    )


def _sorted(outcomes: Iterable[ShapeOutcome]) -> list[ShapeOutcome]:
    return sorted(outcomes, key=lambda o: (o.shape.max_packed_tokens, o.shape.max_packed_seqs))


def _token_candidates(sizes: MicrobatchSizes, capacity: PackedShape) -> list[PackedShape]:
    """Return the capacity and smaller ones for most microbatches, each with a large enough N."""
    multiple, largest = capacity.document_multiple, capacity.max_packed_tokens
    unit = multiple * max(1, largest // _TOKEN_PARTS // multiple)
    tokens = {min(largest, -(-quantile(sizes.num_rows, q) // unit) * unit) for q in _QUANTILES}
    return [
        replace(
            capacity,
            max_packed_seqs=int(sizes.num_documents.max()) + 1,
            max_packed_tokens=count,
        )
        for count in sorted(tokens | {largest})
    ]


def _sequence_candidates(sizes: MicrobatchSizes, roomy: PackedShape, budget: int) -> set[int]:
    median = quantile(sizes.num_documents, 0.5)
    powers = (1 << k for k in range(1, (2 * roomy.max_packed_seqs - 1).bit_length()))
    # Below the median, half of all microbatches would be misfits.
    candidates = {size for size in powers if size > median}
    fewest = _fewest_sequences(sizes, roomy, budget)
    return candidates if fewest is None else candidates | {fewest}


def _fewest_sequences(sizes: MicrobatchSizes, roomy: PackedShape, budget: int) -> int | None:
    """Return the smallest N within the budget of misfits; None if the tokens alone exceed it."""
    has_room = fits(sizes, roomy)
    left = budget - int((~has_room).sum())
    if left < 0:
        return None
    counts = np.sort(sizes.num_documents[has_room])[::-1]
    return int(counts[left]) + 1 if left < len(counts) else 2


def _best(outcomes: Iterable[ShapeOutcome]) -> ShapeOutcome | None:
    """Return the best outcome; ``outcomes`` are sorted by sequences within a token capacity."""
    # With a larger N than the fewest, other steps are replayed: padding cannot be compared.
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

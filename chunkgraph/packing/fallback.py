"""Estimate, for a shape and a dataset, how many steps run eagerly and how many rows are padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import PackingError
from chunkgraph.packing.microbatches import MicrobatchSizes
from chunkgraph.packing.shape import PackedShape

__all__ = ["ShapeOutcome", "allowed_misfits", "evaluate", "fallback_share", "fits", "padding_waste"]


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

    Raises:
        PackingError: a count is negative.
    """
    if min(num_misfits, num_microbatches, microbatches_per_step) < 0:
        msg = (
            f"{num_misfits} misfits among {num_microbatches} microbatches, "
            f"{microbatches_per_step} per step: counts must be at least 0."
        )
        raise PackingError(msg)
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
    low, high = 0, num_microbatches
    while low < high:
        middle = (low + high + 1) // 2
        if fallback_share(middle, num_microbatches, microbatches_per_step) <= target:
            low = middle
        else:
            high = middle - 1
    return low


def fits(sizes: MicrobatchSizes, shape: PackedShape) -> NDArray[np.bool_]:
    """Return which microbatches fit a shape, bool [microbatches]; as `reason_not_to_fit`."""
    fitting: NDArray[np.bool_] = (
        (sizes.longest <= shape.document_limit)
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

"""How often steps would run eagerly, and what padding costs, for a shape and a dataset."""

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
    """What training with one shape would be like."""

    shape: PackedShape
    num_misfits: int
    """Microbatches of the dataset that do not fit."""
    fallback_share: float
    """Share of steps with such a microbatch, 0 to 1; those run eagerly."""
    padding_waste: float | None
    """Share of a replayed microbatch's rows that hold no token; None when none fits."""
    bucketed_waste: float | None
    """The same when the shape's default buckets are captured too."""


def fallback_share(num_misfits: int, num_microbatches: int, microbatches_per_step: int) -> float:
    """Expected share of steps with a misfit when steps draw microbatches without replacement.

    Args:
        num_misfits: Microbatches that do not fit, among all.
        num_microbatches: All microbatches of the dataset.
        microbatches_per_step: Of all data-parallel ranks together; one misfit among them makes
            the whole step eager. A step that takes more than there are has every one.

    Raises:
        PackingError: A count is below 0.
    """
    if min(num_misfits, num_microbatches, microbatches_per_step) < 0:
        msg = (
            f"{num_misfits} misfits among {num_microbatches} microbatches, "
            f"{microbatches_per_step} in a step: counts are at least 0."
        )
        raise PackingError(msg)
    drawn = min(microbatches_per_step, num_microbatches)
    if num_misfits == 0:
        return 0.0
    if num_misfits > num_microbatches - drawn:
        return 1.0
    # No misfit among the drawn: each draw in turn takes a fitting one from what is left.
    left = num_microbatches - np.arange(drawn, dtype=np.float64)
    return float(-np.expm1(np.log1p(-num_misfits / left).sum()))


def allowed_misfits(target: float, num_microbatches: int, microbatches_per_step: int) -> int:
    """The most misfits with which the fallback share stays at or below ``target``."""
    low, high = 0, num_microbatches
    while low < high:
        middle = (low + high + 1) // 2
        if fallback_share(middle, num_microbatches, microbatches_per_step) <= target:
            low = middle
        else:
            high = middle - 1
    return low


def fits(sizes: MicrobatchSizes, shape: PackedShape) -> NDArray[np.bool_]:
    """Which microbatches fit a shape, [microbatches]; the rule of `reason_not_to_fit`."""
    fitting: NDArray[np.bool_] = (
        (sizes.longest <= shape.document_limit)
        & (sizes.num_documents <= shape.max_documents)
        & (sizes.num_rows <= shape.max_packed_tokens)
    )
    return fitting


def padding_waste(sizes: MicrobatchSizes, shapes: Sequence[PackedShape]) -> float | None:
    """Share of rows without a token, each microbatch in the smallest shape that it fits.

    Microbatches that fit none run eagerly and are left out; None when that is all of them.
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
    """What training on these microbatches with this shape would be like."""
    num_misfits = int((~fits(sizes, shape)).sum())
    return ShapeOutcome(
        shape=shape,
        num_misfits=num_misfits,
        fallback_share=fallback_share(num_misfits, len(sizes), microbatches_per_step),
        padding_waste=padding_waste(sizes, [shape]),
        bucketed_waste=padding_waste(sizes, shape.buckets()),
    )

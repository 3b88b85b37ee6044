"""Check document lengths and cumulative offsets that come from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chunkgraph.errors import PackingError

MAX_TOKENS = 2**31 - 1
"""The largest offset: attention kernels read int32."""

Lengths = Sequence[int] | NDArray[np.integer]


def check_lengths(lengths: Lengths) -> NDArray[np.int64]:
    """Return the lengths as an array, int64 [documents]; int64 arrays are not copied.

    Args:
        lengths: tokens of each document.

    Raises:
        PackingError: there is no document, one has less than one token, or the lengths are not a
            list of integers.
    """
    array = _as_array(lengths, "document lengths must be a list of integers")
    if array.size == 0:
        raise PackingError(
            "a microbatch without documents cannot be packed. Add at least one "
            "document, or leave it out."
        )
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise PackingError(
            f"document lengths must be a list of integers, not {array.dtype} of "
            f"shape {list(array.shape)}."
        )
    array = array.astype(np.int64, copy=False)
    if array.min() < 1:
        index = int(np.argmax(array < 1))
        raise PackingError(
            f"document {index} of {array.size} has a length of {array[index]}. "
            "Every document needs at least 1 token: drop empty documents before packing."
        )
    return array


def check_offsets(cu_seqlens: ArrayLike, num_tokens: int, where: str = "") -> None:
    """Refuse cumulative offsets with which attention kernels would read out of bounds.

    Args:
        cu_seqlens: the beginning of each document and the end of the last, int32 [documents + 1].
        num_tokens: rows of the tensors that the offsets point into.
        where: the place that a message names, such as ``"rank 3, microbatch 7"``.

    Raises:
        PackingError: the offsets are not an int32 array of one dimension, have no document, do not
            start at 0, decrease, or exceed ``num_tokens``. Equal neighbours are empty sequences, as
            in arrays padded to a fixed shape.
    """
    place = f"{where}: " if where else ""
    offsets = _as_array(cu_seqlens, f"{place}cu_seqlens must be a list of integers")
    problem = _problem(offsets, num_tokens)
    if problem is not None:
        raise PackingError(
            f"{place}{problem} cu_seqlens must be int32, start at 0, rise by each "
            f"document's length and end at or below the microbatch's {num_tokens} tokens."
        )


def _as_array(values: ArrayLike, requirement: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        # For example nested lists of different lengths.
        raise PackingError(f"{requirement}; these values form no array: {error}") from None


def _problem(offsets: NDArray[np.generic], num_tokens: int) -> str | None:
    if offsets.ndim != 1:
        return f"cu_seqlens has the shape {list(offsets.shape)}, not one dimension."
    # Check the size before the dtype: an empty list has a meaningless one.
    if offsets.size < 2:
        return f"cu_seqlens has {offsets.size} entries, so there is no document."
    if offsets.dtype != np.int32:
        return f"cu_seqlens is {offsets.dtype}, not int32."
    values = offsets.astype(np.int64)
    if values[0] != 0:
        return f"cu_seqlens starts at {values[0]}, not at 0."
    steps = np.diff(values)
    if steps.min() < 0:
        index = int(np.argmax(steps < 0))
        return (
            f"cu_seqlens decreases from {values[index]} to {values[index + 1]} (entry {index + 1})."
        )
    if values[-1] > num_tokens:
        return f"cu_seqlens ends at {values[-1]}, beyond the {num_tokens} tokens."
    return None

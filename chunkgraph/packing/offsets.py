"""Lengths and cumulative offsets that come from outside, checked before anything uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from chunkgraph.errors import PackingError

__all__ = [
    "MAX_TOKENS",
    "check_lengths",
    "check_offsets",
    "document_lengths",
    "located",
    "whole_number",
]

MAX_TOKENS = 2**31 - 1
"""What offsets can count: they are int32, as attention kernels read them."""
_INT64_MAX = 2**63 - 1

Lengths = Sequence[int] | NDArray[np.integer]


def located(where: str) -> str:
    """What an error message begins with: the place, such as ``rank 3, microbatch 7: ``."""
    return f"{where}: " if where else ""


def whole_number(value: object) -> int | None:
    """The value as a Python integer, NumPy's integers too; None when it is no whole number."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    return None


def check_lengths(lengths: Lengths, where: str = "") -> NDArray[np.int64]:
    """The lengths as an array, int64 [documents].

    Args:
        lengths: Tokens of each document.
        where: The place that a message names, such as ``"rank 3, microbatch 7"``.

    Raises:
        PackingError: There is no document, one has less than one token or more than int64 holds,
            or the lengths are no list of integers.
    """
    array = _as_array(lengths, f"{located(where)}document lengths are a list of integers")
    if array.size == 0:
        msg = (
            f"{located(where)}a microbatch without documents cannot be packed. Give it at least "
            "one document, or leave it out."
        )
        raise PackingError(msg)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        msg = (
            f"{located(where)}document lengths are a list of integers, not {array.dtype} of shape "
            f"{list(array.shape)}."
        )
        raise PackingError(msg)
    if array.min() < 1:
        index = int(np.argmax(array < 1))
        msg = (
            f"{located(where)}document {index} of {array.size} has a length of {array[index]}. "
            "Every document needs at least 1 token: drop empty ones before they are packed."
        )
        raise PackingError(msg)
    # Unsigned ones would turn negative.
    if int(array.max()) > _INT64_MAX:
        index = int(np.argmax(array))
        msg = (
            f"{located(where)}document {index} of {array.size}: a length of {array[index]} tokens "
            f"is no document's; offsets end at {MAX_TOKENS}."
        )
        raise PackingError(msg)
    return array.astype(np.int64, copy=False)


def check_offsets(
    cu_seqlens: ArrayLike, num_tokens: int, where: str = "", *, may_repeat: bool = False
) -> None:
    """Refuse cumulative offsets that attention kernels would read out of bounds with.

    Args:
        cu_seqlens: int32 [documents + 1]: where each document begins, and where the last one ends.
        num_tokens: Rows of the tensors that the offsets point into.
        where: The place that a message names, such as ``"rank 3, microbatch 7"``.
        may_repeat: Accept equal neighbours, which arrays padded to a fixed shape have.

    Raises:
        PackingError: The offsets are no array, not int32 or not one-dimensional, name no document,
            do not start at 0, decrease, repeat, or go beyond the tokens.
    """
    offsets = _as_array(cu_seqlens, f"{located(where)}cu_seqlens is a list of integers")
    problem = _problem(offsets, num_tokens, may_repeat=may_repeat)
    if problem is not None:
        msg = (
            f"{located(where)}{problem} cu_seqlens starts at 0, rises by each document's length "
            f"and ends at or below the microbatch's {num_tokens} tokens, as int32."
        )
        raise PackingError(msg)


def document_lengths(cu_seqlens: ArrayLike, num_tokens: int, where: str = "") -> NDArray[np.int64]:
    """The lengths that offsets stand for, int64 [documents], after `check_offsets`.

    Raises:
        PackingError: See `check_offsets`.
    """
    check_offsets(cu_seqlens, num_tokens, where)
    offsets = np.asarray(cu_seqlens).astype(np.int64)
    return offsets[1:] - offsets[:-1]


def _as_array(values: ArrayLike, wanted: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:
        # Such as lists of different lengths.
        msg = f"{wanted}, and these make no array: {error}"
        raise PackingError(msg) from None


def _problem(offsets: NDArray[np.generic], num_tokens: int, *, may_repeat: bool) -> str | None:
    if offsets.ndim != 1:
        return f"cu_seqlens has the shape {list(offsets.shape)}, not one dimension."
    # Shape before type: an empty list has no type to speak of.
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
    if not may_repeat and steps.min() == 0:
        index = int(np.argmax(steps == 0))
        return f"Document {index} has no tokens (cu_seqlens repeats {values[index]})."
    if values[-1] > num_tokens:
        return f"cu_seqlens ends at {values[-1]}, beyond the {num_tokens} tokens."
    return None

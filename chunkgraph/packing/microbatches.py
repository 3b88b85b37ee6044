"""Sizes of the microbatches that a data path without the limits of graphs makes of documents."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.shape import PackedShape

__all__ = ["LongDocuments", "MicrobatchSizes", "fit_long_documents", "pack_in_order", "sizes_of"]

_BLOCK = 1 << 16


class LongDocuments(enum.Enum):
    """The treatment of documents that are longer than a microbatch."""

    TRUNCATE = "truncate"
    SPLIT = "split"
    KEEP = "keep"


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


def fit_long_documents(
    lengths: NDArray[np.int64], limit: int, policy: LongDocuments
) -> NDArray[np.int64]:
    """Return the lengths after truncating, splitting or keeping documents above ``limit`` tokens.

    Raises:
        PackingError: there is no memory for so many parts.
    """
    if policy is LongDocuments.KEEP:
        return lengths
    if policy is LongDocuments.TRUNCATE:
        return np.minimum(lengths, limit)
    num_parts = -(-lengths // limit)
    total = int(num_parts.sum())
    try:
        parts = np.full(total, limit, dtype=np.int64)
    except MemoryError:
        msg = (
            f"Splitting documents into parts of at most {limit} tokens makes {total} parts, for "
            "which there is no memory. Allow longer parts, or truncate or keep long documents."
        )
        raise PackingError(msg) from None
    parts[np.cumsum(num_parts) - 1] = lengths - (num_parts - 1) * limit
    return parts


def pack_in_order(
    lengths: NDArray[np.int64],
    shape: PackedShape,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Fill microbatches with documents in order; each ends before the first that has no room.

    Only the shape's tokens limit a microbatch, not its sequences, as in a data path without
    graphs. A document with more rows than the capacity gets its own microbatch.

    Args:
        lengths: tokens of each document, int64 [documents].
        shape: the capacity in tokens, and the context parallelism that pads documents.
        progress: called with the number of documents done and the total.

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
        if progress is not None:
            progress(begin + len(block), len(rows))
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

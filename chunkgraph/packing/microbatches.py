"""Sizes of the microbatches that a data path which knows no limits would make of documents."""

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
    """What a data path does with a document that is longer than a microbatch."""

    TRUNCATE = "truncate"
    SPLIT = "split"
    KEEP = "keep"


@dataclass(frozen=True, eq=False, kw_only=True)
class MicrobatchSizes:
    """What decides whether microbatches fit a shape; int64, [microbatches] each."""

    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    """Tokens with the padding that context parallelism puts after documents."""
    longest: NDArray[np.int64]
    """Tokens of the longest document."""

    def __len__(self) -> int:
        return len(self.num_documents)


def fit_long_documents(
    lengths: NDArray[np.int64], limit: int, policy: LongDocuments
) -> NDArray[np.int64]:
    """The lengths after documents above ``limit`` tokens were cut to it, split, or kept.

    Raises:
        PackingError: There is no memory for so many parts.
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
            f"Documents split into parts of at most {limit} tokens are {total} parts, for which "
            "there is no memory. Allow longer ones, or truncate or keep long documents."
        )
        raise PackingError(msg) from None
    parts[np.cumsum(num_parts) - 1] = lengths - (num_parts - 1) * limit
    return parts


def pack_in_order(
    lengths: NDArray[np.int64],
    shape: PackedShape,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Fill microbatches with documents in their order; each ends before what has no room.

    Only the shape's tokens count, not its sequences: this is a data path that knows nothing of
    graphs. A document with more rows than the capacity is a microbatch of its own.

    Args:
        lengths: Tokens of each document.
        shape: Its tokens are the capacity; its context parallelism pads documents.
        progress: Called with the documents done and all documents.

    Returns:
        Where each microbatch ends, int64 [microbatches]: the documents before it.

    Raises:
        PackingError: There is no document, or one has less than one token.
    """
    rows = shape.padded_lengths(check_lengths(lengths))
    row_ends = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(rows, out=row_ends[1:])
    ends: list[int] = []
    place = 0
    # One search for a block of possible beginnings is far faster than one for each microbatch.
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
    """The sizes of microbatches, given where each ends among the documents."""
    starts = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]])
    return MicrobatchSizes(
        num_documents=ends - starts,
        num_tokens=np.add.reduceat(lengths, starts),
        num_rows=np.add.reduceat(shape.padded_lengths(lengths), starts),
        longest=np.maximum.reduceat(lengths, starts),
    )

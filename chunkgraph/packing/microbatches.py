"""Sizes of the microbatches that a data path without the limits of graphs makes of documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chunkgraph.packing.offsets import check_lengths
from chunkgraph.packing.shape import PackedShape

__all__ = ["MicrobatchSizes", "pack_in_order", "quantile", "sizes_of"]

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

"""Pack one microbatch's documents into arrays of fixed shapes.

There are two offset arrays. ``cu_seqlens`` counts tokens: its differences are the documents' true
lengths, or the padded lengths where the shape counts padding. ``cu_seqlens_padded`` counts rows: it
is where each sequence lies in memory. With ``pad_between_seqs=True`` Transformer Engine reads
lengths from the first and places from the second; with False it reads both from the first.

*Only a tail* (C = 1, or padding that counts): the arrays agree up to the last document. The dummy
sequence after it has no token and all remaining rows. With False, attention would still be correct
for every document, but the tail's rows would belong to no sequence: fused RoPE does not write such
rows, and their stale contents reach weight gradients. Because of the dummy, kernels that work on
rows cover every row, and kernels that work on tokens do nothing there.

*Padding between documents* (C > 1) that does not count: the arrays differ from the first padded
document on. With False, every later document would be read from the wrong place, and attention
would treat padding as text.

A graph holds the flag as a constant, and any microbatch may have a tail, so it is True in every
capture.

``max_seqlen`` is T for the same reason. It bounds the rows of a sequence, the dummy's included:
fused RoPE visits that many rows of each sequence and has a table of that many rows, and the dummy
of a short microbatch takes nearly all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import Lengths, check_lengths
from chunkgraph.packing.shape import OverflowReason, PackedShape, overflow_reason

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequences:
    """A packed microbatch; for N, T and C see `PackedShape`."""

    shape: PackedShape
    cu_seqlens: NDArray[np.int32]
    """Offsets in tokens (in rows if the shape has ``counts_padding``), [N + 1]; entries after the
    last document repeat its end."""
    cu_seqlens_padded: NDArray[np.int32]
    """Offsets in rows, [N + 1]; the dummy, and every empty sequence after it, ends at T."""
    position_ids: NDArray[np.int64]
    """Position of each row in its document, [T]; 0 in padding."""
    padding_mask: NDArray[np.bool_]
    """True where a row holds no token, [T]: after padded documents and in the tail."""
    seq_idx: NDArray[np.int32]
    """Index of each row's document, [T]; padding rows have `num_documents`, the dummy's index."""
    num_valid_tokens: int
    """Tokens of all documents."""
    max_seqlen: int
    """T, the most rows of any sequence of this shape."""
    num_documents: int

    def place(self, values: NDArray[_Value]) -> NDArray[_Value]:
        """Return the values of tokens in the tokens' rows, and 0 in padding rows.

        Args:
            values: a value for each token, without padding, [num_valid_tokens, ...], for example
                tokens, labels or a loss mask.

        Returns:
            A new array, [T, ...], of the same dtype.

        Raises:
            PackingError: the number of values differs from the number of tokens.
        """
        if len(values) != self.num_valid_tokens:
            raise PackingError(
                f"{len(values)} values for documents of {self.num_valid_tokens} tokens."
            )
        rows = np.zeros((self.shape.max_packed_tokens, *values.shape[1:]), dtype=values.dtype)
        rows[~self.padding_mask] = values
        return rows

    def rows_of_rank(self, context_parallel_rank: int) -> NDArray[np.int64]:
        """Return the indices of the rows on one context-parallel rank, in its order, int64 [T / C].

        Every sequence, including the dummy, has 2 C equal pieces. Rank r holds pieces r and
        2 C - 1 - r, so all ranks do the same share of causal attention.

        Raises:
            PackingError: there is no such rank.
        """
        size = self.shape.context_parallel_size
        if not 0 <= context_parallel_rank < size:
            raise PackingError(
                f"context-parallel rank {context_parallel_rank} is outside 0..{size - 1}."
            )
        if size == 1:
            return np.arange(self.shape.max_packed_tokens, dtype=np.int64)
        starts = self.cu_seqlens_padded[:-1].astype(np.int64)
        piece = np.diff(self.cu_seqlens_padded).astype(np.int64) // (2 * size)
        pair = np.array([context_parallel_rank, 2 * size - 1 - context_parallel_rank])
        begins = (starts[:, None] + piece[:, None] * pair).ravel()
        lengths = np.repeat(piece, 2)
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1], dtype=np.int64) - np.repeat(ends - lengths, lengths)
        rows: NDArray[np.int64] = np.repeat(begins, lengths) + within
        return rows


def pack(lengths: Lengths, shape: PackedShape) -> PackedSequences:
    """Lay out documents one after the other in a fixed shape.

    Args:
        lengths: tokens of each document, in the order of the layout.
        shape: the shape, which the documents must fit (`reason_not_to_fit`).

    Raises:
        PackingError: there is no document, one has less than one token, or they do not fit.
    """
    tokens = check_lengths(lengths)
    reason = overflow_reason(tokens, shape)
    if reason is not None:
        raise PackingError(_overflow_message(tokens, shape, reason))
    rows = shape.padded_lengths(tokens)
    num_documents, num_rows = tokens.size, int(rows.sum())
    row_ends = np.cumsum(rows)
    ends = row_ends if shape.counts_padding else np.cumsum(tokens)

    cu_seqlens = np.full(shape.max_packed_seqs + 1, ends[-1], dtype=np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : num_documents + 1] = ends
    cu_seqlens_padded = np.full(shape.max_packed_seqs + 1, shape.max_packed_tokens, dtype=np.int32)
    cu_seqlens_padded[0] = 0
    cu_seqlens_padded[1 : num_documents + 1] = row_ends

    document = np.repeat(np.arange(num_documents, dtype=np.int32), rows)
    position = np.arange(num_rows, dtype=np.int64) - np.repeat(row_ends - rows, rows)
    is_padding = position >= np.repeat(tokens, rows)

    position_ids = np.zeros(shape.max_packed_tokens, dtype=np.int64)
    position_ids[:num_rows] = np.where(is_padding, 0, position)
    padding_mask = np.ones(shape.max_packed_tokens, dtype=np.bool_)
    padding_mask[:num_rows] = is_padding
    seq_idx = np.full(shape.max_packed_tokens, num_documents, dtype=np.int32)
    seq_idx[:num_rows] = np.where(is_padding, num_documents, document)
    return PackedSequences(
        shape=shape,
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        position_ids=position_ids,
        padding_mask=padding_mask,
        seq_idx=seq_idx,
        num_valid_tokens=int(tokens.sum()),
        max_seqlen=shape.max_packed_tokens,
        num_documents=int(num_documents),
    )


def _overflow_message(tokens: NDArray[np.int64], shape: PackedShape, reason: OverflowReason) -> str:
    match reason:
        case OverflowReason.DOCUMENT_TOO_LONG:
            index = int(np.argmax(tokens))
            detail = f"document {index} has {tokens[index]} tokens of {shape.max_packed_tokens}"
        case OverflowReason.TOO_MANY_DOCUMENTS:
            detail = (
                f"{tokens.size} documents; {shape.max_packed_seqs} sequences are "
                f"{shape.max_documents} documents and the dummy"
            )
        case OverflowReason.TOO_MANY_TOKENS:
            rows = int(shape.padded_lengths(tokens).sum())
            detail = f"{rows} tokens with padding, of {shape.max_packed_tokens}"
    return (
        f"the documents do not fit: {reason.value} ({detail}). Call "
        "reason_not_to_fit() first and run the step eagerly, or raise the limit."
    )

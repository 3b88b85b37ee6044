"""One microbatch's documents as arrays of fixed shapes.

What the two offset arrays mean. ``cu_seqlens`` counts tokens: its differences are the documents'
true lengths, or those with padding where the shape counts it. ``cu_seqlens_padded`` counts rows: it
says where each sequence lies in memory. Transformer Engine reads lengths from the one and places
from the other, but only with ``pad_between_seqs=True``; with False it takes the first for both.

*A tail alone* (C = 1, or padding that counts): the arrays agree up to the last document, and only
the dummy after it differs: no token, all remaining rows. With False attention would still be right
for every document, but the tail's rows would belong to no sequence: fused RoPE leaves such rows
unwritten, and what lies there reaches weight gradients. The dummy makes kernels that work on rows
cover every row, and those that work on tokens do nothing there.

*Padding between documents* (C > 1) that does not count: the arrays differ from the first padded
document on. With False every later document would be read from the wrong place, and padding
attended to as if it were text.

A graph holds the flag as a constant, and any microbatch may have a tail. So it is True for every
capture.

``max_seqlen`` is T for the same reason. It bounds the rows of a sequence, the dummy's too: fused
RoPE visits that many rows of each and has a table of as many, and the dummy of a short microbatch
takes nearly all. Where documents are known to be shorter, it is the longest that one may be, and
no dummy has more rows either: the tail has as many as it needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import Lengths, check_lengths, located
from chunkgraph.packing.shape import OverflowReason, PackedShape, overflow_reason

__all__ = ["PackedSequences", "pack"]

_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedSequences:
    """A packed microbatch; N, T and C are its shape's (see `PackedShape`)."""

    shape: PackedShape
    cu_seqlens: NDArray[np.int32]
    """Offsets in tokens, with the shape's ``counts_padding`` in rows, [S + 1]; entries after the
    last document repeat its end. S is N, or more with a limit on documents
    (`PackedShape.num_sequences`)."""
    cu_seqlens_padded: NDArray[np.int32]
    """Offsets in rows, [S + 1]; the last dummy, and every empty sequence after it, ends at T."""
    position_ids: NDArray[np.int64]
    """Place of each row in its document, [T]; 0 in padding."""
    padding_mask: NDArray[np.bool_]
    """True where a row holds no token, [T]: after documents that are padded and in the tail."""
    seq_idx: NDArray[np.int32]
    """Document of each row, from 0, [T]; padding rows have the dummy's, `num_documents`."""
    num_valid_tokens: int
    """Tokens of all documents."""
    max_seqlen: int
    """The most rows that any sequence of this shape can take, a constant: T without a limit."""
    num_documents: int

    def place(self, values: NDArray[_Value], fill: object = 0) -> NDArray[_Value]:
        """Values of the tokens, end to end without padding, put in their rows.

        Args:
            values: [num_valid_tokens, ...], such as tokens, labels or a loss mask.
            fill: What padding rows get.

        Returns:
            [T, ...] of the same dtype.

        Raises:
            PackingError: There are not as many values as tokens.
        """
        if len(values) != self.num_valid_tokens:
            msg = f"{len(values)} values for documents of {self.num_valid_tokens} tokens."
            raise PackingError(msg)
        rows = np.full((self.shape.max_packed_tokens, *values.shape[1:]), fill, dtype=values.dtype)
        rows[~self.padding_mask] = values
        return rows

    def rows_of_rank(self, context_parallel_rank: int) -> NDArray[np.int64]:
        """Rows that one context-parallel rank holds, in its order, int64 [T / C].

        Every sequence, the dummy too, is cut in 2 C equal pieces; rank r has pieces r and
        2 C - 1 - r, so that all ranks have the same share of causal attention.
        """
        size = self.shape.context_parallel_size
        if not 0 <= context_parallel_rank < size:
            msg = f"context-parallel rank {context_parallel_rank} is outside 0..{size - 1}."
            raise PackingError(msg)
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


def pack(lengths: Lengths, shape: PackedShape, *, where: str = "") -> PackedSequences:
    """Lay documents out one after the other in a fixed shape.

    Args:
        lengths: Tokens of each document, in the order in which they are laid out.
        shape: The shape, which the documents must fit (`reason_not_to_fit`).
        where: The place that a message names, such as ``"rank 3, microbatch 7"``.

    Raises:
        PackingError: There is no document, one has less than one token, or they do not fit.
    """
    tokens = check_lengths(lengths, where)
    reason = overflow_reason(tokens, shape)
    if reason is not None:
        raise PackingError(_overflow_message(tokens, shape, reason, where))
    rows = shape.padded_lengths(tokens)
    num_documents, num_rows = tokens.size, int(rows.sum())
    row_ends = np.cumsum(rows)
    ends = row_ends if shape.counts_padding else np.cumsum(tokens)

    cu_seqlens = np.full(shape.num_sequences + 1, ends[-1], dtype=np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : num_documents + 1] = ends
    cu_seqlens_padded = np.full(shape.num_sequences + 1, shape.max_packed_tokens, dtype=np.int32)
    cu_seqlens_padded[0] = 0
    cu_seqlens_padded[1 : num_documents + 1] = row_ends
    dummies = np.arange(1, shape.num_sequences - num_documents + 1)
    cu_seqlens_padded[num_documents + 1 :] = np.minimum(
        num_rows + dummies * shape.longest_rows, shape.max_packed_tokens
    )

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
        max_seqlen=shape.longest_rows,
        num_documents=int(num_documents),
    )


def _overflow_message(
    tokens: NDArray[np.int64], shape: PackedShape, reason: OverflowReason, where: str
) -> str:
    match reason:
        case OverflowReason.DOCUMENT_TOO_LONG:
            index = int(np.argmax(tokens))
            detail = f"document {index} has {tokens[index]} tokens of {shape.document_limit}"
        case OverflowReason.TOO_MANY_DOCUMENTS:
            detail = (
                f"{tokens.size} documents, and {shape.max_packed_seqs} sequences hold "
                f"{shape.max_documents} and the dummy"
            )
        case OverflowReason.TOO_MANY_TOKENS:
            rows = int(shape.padded_lengths(tokens).sum())
            detail = f"{rows} tokens with padding, of {shape.max_packed_tokens}"
    return (
        f"{located(where)}the documents do not fit: {reason.value} ({detail}). Ask "
        "reason_not_to_fit() first and run the step eagerly, or raise the limit."
    )

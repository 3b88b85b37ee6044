"""The fixed shape that microbatches are packed into, and whether documents fit it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real

import numpy as np
from numpy.typing import NDArray

from chunkgraph.errors import PackingError
from chunkgraph.packing.offsets import MAX_TOKENS, Lengths, check_lengths, whole_number

__all__ = [
    "OverflowReason",
    "PackedShape",
    "bucket_multiple",
    "bucket_shapes",
    "reason_not_to_fit",
    "smallest_that_fits",
]

# What Transformer Engine's products in FP8 take a multiple of: those of weight gradients sum over
# rows (Megatron's ``get_fp8_align_size``).
_FP8_ROWS = 16


class OverflowReason(enum.Enum):
    """Why documents do not fit a shape; the value is text for logs and counters."""

    DOCUMENT_TOO_LONG = "a document is longer than allowed"
    TOO_MANY_DOCUMENTS = "too many documents"
    TOO_MANY_TOKENS = "too many tokens"


@dataclass(frozen=True, order=False)
class PackedShape:
    """Sizes that all arrays of a packed microbatch have, whatever documents are in it.

    NumPy's integers are taken too, and become Python's.

    Args:
        max_packed_seqs: N, the sequences of a microbatch. The zero-valid dummy that fills the tail
            is one of them, so a microbatch holds at most N - 1 documents; at least 2.
        max_packed_tokens: T, the rows of a microbatch over all its context-parallel ranks
            together; a multiple of 2 C when C is above 1, and of ``pad_seq_to_mult``.
        context_parallel_size: C. Above 1 every document is padded to a multiple of 2 C rows,
            because each rank holds two of the 2 C pieces of every document.
        max_document_tokens: Tokens that one document may have; None allows T. Kernels are then told
            of no longer sequence, so that the tail is spread over several dummies, which come on
            top of N.
        counts_padding: Whether attention is told that the padding behind a document belongs to it,
            as Megatron's ``--sft`` data does. Causal attention gives its tokens the same numbers:
            none looks at a later row; of another kind they would look at padding. Loss, routers and
            state-space layers leave padding out either way.
        pad_seq_to_mult: Rows that a document is padded to a multiple of, besides 2 C. With the
            block of rows that Mamba's kernels work on, no two documents share a block, and nothing
            of one reaches another, not even by rounding. Above 1 only with ``counts_padding``,
            since attention kernels may leave rows unwritten that they are told to be padding.

    Raises:
        PackingError: A size is out of its range.
    """

    max_packed_seqs: int
    max_packed_tokens: int
    context_parallel_size: int = 1
    max_document_tokens: int | None = None
    counts_padding: bool = False
    pad_seq_to_mult: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_packed_seqs", self.max_packed_seqs, 2),
            ("max_packed_tokens", self.max_packed_tokens, 1),
            ("context_parallel_size", self.context_parallel_size, 1),
            ("max_document_tokens", self.max_document_tokens, 1),
            ("pad_seq_to_mult", self.pad_seq_to_mult, 1),
        ):
            if value is None and name == "max_document_tokens":
                continue
            number = whole_number(value)
            if number is None or number < least:
                why = " (one document and the dummy)" if name == "max_packed_seqs" else ""
                msg = f"{name} is {value!r}; it is a whole number of at least {least}{why}."
                raise PackingError(msg)
            # NumPy's integers would overflow in sums, and are none to JSON.
            object.__setattr__(self, name, number)
        if self.max_packed_tokens > MAX_TOKENS:
            msg = f"max_packed_tokens is {self.max_packed_tokens}; offsets end at {MAX_TOKENS}."
            raise PackingError(msg)
        if self.max_packed_tokens % self.document_multiple:
            nearest = self.padded_length(self.max_packed_tokens)
            why = (
                f"which context_parallel_size {self.context_parallel_size} cannot split in "
                f"{self.document_multiple} equal parts. The next that it can is {nearest}"
                if self.pad_seq_to_mult == 1
                else f"no multiple of {self.document_multiple}, to which documents are padded "
                f"(pad_seq_to_mult {self.pad_seq_to_mult}, context_parallel_size "
                f"{self.context_parallel_size}). The next is {nearest}"
            )
            raise PackingError(f"max_packed_tokens is {self.max_packed_tokens}, {why}.")
        if self.pad_seq_to_mult > 1 and not self.counts_padding:
            msg = (
                f"pad_seq_to_mult is {self.pad_seq_to_mult} without counts_padding: attention may "
                "leave rows between documents as they were. Give counts_padding=True."
            )
            raise PackingError(msg)
        limit = self.max_document_tokens
        if limit is not None and limit > self.max_packed_tokens:
            msg = (
                f"max_document_tokens is {limit}, more than max_packed_tokens "
                f"{self.max_packed_tokens}."
            )
            raise PackingError(msg)

    @property
    def max_documents(self) -> int:
        """Documents that a microbatch can hold: N less the dummy."""
        return self.max_packed_seqs - 1

    @property
    def document_multiple(self) -> int:
        """Rows that a document's padded length is a multiple of: 2 C (1 without C), and more."""
        pieces = 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size
        return math.lcm(pieces, self.pad_seq_to_mult)

    @property
    def document_limit(self) -> int:
        """Tokens that one document may have."""
        limit = self.max_document_tokens
        return self.max_packed_tokens if limit is None else limit

    @property
    def longest_rows(self) -> int:
        """The most rows that a sequence can take, a document or a dummy."""
        return self.padded_length(self.document_limit)

    @property
    def num_sequences(self) -> int:
        """Sequences that offsets tell of: N, and what dummies the longest tail needs besides."""
        return self.max_documents + -(-self.max_packed_tokens // self.longest_rows)

    @property
    def tokens_per_rank(self) -> int:
        """Rows of a microbatch on one context-parallel rank: T / C."""
        return self.max_packed_tokens // self.context_parallel_size

    def padded_length(self, length: int) -> int:
        """Rows that a document of ``length`` tokens takes."""
        return -(-length // self.document_multiple) * self.document_multiple

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows that each document takes, int64 [documents]."""
        return -(-lengths // self.document_multiple) * self.document_multiple

    def first_with_empty_piece(self, lengths: Lengths) -> int | None:
        """The first document that has nothing for attention in the last of its 2 C pieces, or None.

        A rank with two pieces works on each alone at times. Documents of 4 C^2 tokens or more have
        tokens in all of them, and with ``counts_padding`` no piece is empty.
        """
        if self.context_parallel_size == 1 or self.counts_padding:
            return None
        tokens = np.asarray(lengths, dtype=np.int64)
        rows = self.padded_lengths(tokens)
        found = np.flatnonzero(rows - tokens >= rows // self.document_multiple)
        return int(found[0]) if found.size else None

    def buckets(
        self, fractions: Sequence[float | Fraction] = (1 / 4, 1 / 2, 1), *, multiple_of: int = 1
    ) -> tuple[PackedShape, ...]:
        """Shapes with parts of the tokens and the same N, smallest first.

        A microbatch replays the graphs of the smallest that it fits. N stays, so that the choice
        depends on tokens alone and ranks can agree on the largest of their choices.

        Args:
            fractions: Parts of T, above 0 and at most 1.
            multiple_of: What each T is rounded up to a multiple of, besides what documents are
                padded to (`bucket_multiple`).

        Raises:
            PackingError: A fraction is out of range, or T itself is no multiple of
                ``multiple_of``.
        """
        multiple = math.lcm(self.document_multiple, multiple_of)
        if not fractions or any(not (_is_number(f) and 0 < f <= 1) for f in fractions):
            msg = f"Bucket fractions are above 0 and at most 1, not {list(fractions)}."
            raise PackingError(msg)
        if self.max_packed_tokens % multiple:
            msg = f"max_packed_tokens {self.max_packed_tokens} is no multiple of {multiple}."
            raise PackingError(msg)
        units = self.max_packed_tokens // multiple
        sizes = {max(1, math.ceil(units * fraction)) * multiple for fraction in fractions}
        limit = self.max_document_tokens
        return tuple(
            replace(
                self,
                max_packed_tokens=size,
                max_document_tokens=None if limit is None else min(limit, size),
            )
            for size in sorted(sizes)
        )


def _is_number(value: object) -> bool:
    """Whether it can be compared to sizes; NumPy's numbers can, texts cannot."""
    return isinstance(value, Real)


def bucket_multiple(
    context_parallel_size: int, *, sequence_parallel_size: int = 1, in_fp8: bool = False
) -> int:
    """Rows that length buckets are a multiple of, besides what documents are padded to.

    Args:
        context_parallel_size: ranks that share the rows.
        sequence_parallel_size: tensor-parallel ranks that share those of each of them.
        in_fp8: whether weights are multiplied in FP8, which takes rows in sixteens on each rank.
    """
    return context_parallel_size * sequence_parallel_size * (_FP8_ROWS if in_fp8 else 1)


def bucket_shapes(
    shape: PackedShape, sizes: Sequence[float], *, multiple_of: int = 1
) -> tuple[PackedShape, ...]:
    """The shape itself and those of its length buckets, largest first.

    Args:
        shape: the largest.
        sizes: of the buckets: parts of T up to 1, or numbers of tokens above 1.
        multiple_of: see `PackedShape.buckets`.

    Raises:
        PackingError: A size is no part of T and no whole number of tokens up to T.
    """
    most = shape.max_packed_tokens
    for size in sizes:
        is_in_range = _is_number(size) and 0 < size <= most
        if not is_in_range or (size > 1 and size != int(size)):
            msg = (
                f"A bucket of {size}: buckets are parts of the {most} tokens, above 0 and at most "
                "1, or whole numbers of tokens up to them."
            )
            raise PackingError(msg)
    parts = [size if size <= 1 else Fraction(int(size), most) for size in sizes]
    return tuple(reversed(shape.buckets([*parts, 1], multiple_of=multiple_of)))


def reason_not_to_fit(lengths: Lengths, shape: PackedShape) -> OverflowReason | None:
    """Why the documents do not fit the shape, or None when they do.

    Raises:
        PackingError: There is no document, or one has less than one token.
    """
    return overflow_reason(check_lengths(lengths), shape)


def overflow_reason(lengths: NDArray[np.int64], shape: PackedShape) -> OverflowReason | None:
    """`reason_not_to_fit` for lengths that were checked."""
    if lengths.max() > shape.document_limit:
        return OverflowReason.DOCUMENT_TOO_LONG
    if lengths.size > shape.max_documents:
        return OverflowReason.TOO_MANY_DOCUMENTS
    if shape.padded_lengths(lengths).sum() > shape.max_packed_tokens:
        return OverflowReason.TOO_MANY_TOKENS
    return None


def smallest_that_fits(lengths: Lengths, shapes: Iterable[PackedShape]) -> PackedShape | None:
    """The shape with the fewest tokens, then the fewest sequences, that the documents fit.

    Raises:
        PackingError: There is no document, or one has less than one token.
    """
    checked = check_lengths(lengths)
    for shape in sorted(shapes, key=lambda s: (s.max_packed_tokens, s.max_packed_seqs)):
        if overflow_reason(checked, shape) is None:
            return shape
    return None

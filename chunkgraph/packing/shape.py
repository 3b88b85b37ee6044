"""The fixed shape of packed microbatches, and the rule whether documents fit it."""

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
from chunkgraph.packing.offsets import MAX_TOKENS, Lengths, check_lengths

# FP8 GEMMs of Transformer Engine take a multiple of this many rows: those of weight gradients sum
# over rows (Megatron's ``get_fp8_align_size``).
_FP8_ROWS = 16


class OverflowReason(enum.Enum):
    """The reason why documents do not fit a shape; the value is its text in logs and counters."""

    DOCUMENT_TOO_LONG = "a document is longer than allowed"
    TOO_MANY_DOCUMENTS = "too many documents"
    TOO_MANY_TOKENS = "too many tokens"


@dataclass(frozen=True, order=False)
class PackedShape:
    """The sizes that all arrays of a packed microbatch have, whatever its documents.

    NumPy integers are converted to Python's.

    Args:
        max_packed_seqs: N, the sequences of a microbatch, at least 2. The empty dummy sequence that
            fills the tail is one of them, so a microbatch holds at most N - 1 documents.
        max_packed_tokens: T, the rows of a microbatch on all its context-parallel ranks together; a
            multiple of 2 C if C is above 1, and of ``pad_seq_to_mult``.
        context_parallel_size: C. Above 1, every document is padded to a multiple of 2 C rows,
            because each rank holds two of its 2 C pieces.
        counts_padding: whether attention treats the padding after a document as part of it, as
            Megatron's ``--sft`` data does. Causal attention computes the same values for tokens,
            since none attends to a later row; other attention would attend to padding. Loss,
            routers and state-space layers ignore padding either way.
        pad_seq_to_mult: documents are padded to a multiple of this many rows as well as of 2 C. If
            it is the block of rows of Mamba's kernels, no two documents share a block, and nothing
            of one reaches another, not even by rounding. Above 1 only with ``counts_padding``,
            since attention kernels need not write rows that they see as padding.

    Raises:
        PackingError: a size is out of range.
    """

    max_packed_seqs: int
    max_packed_tokens: int
    context_parallel_size: int = 1
    counts_padding: bool = False
    pad_seq_to_mult: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_packed_seqs", self.max_packed_seqs, 2),
            ("max_packed_tokens", self.max_packed_tokens, 1),
            ("context_parallel_size", self.context_parallel_size, 1),
            ("pad_seq_to_mult", self.pad_seq_to_mult, 1),
        ):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
                why = " (one document and the dummy)" if name == "max_packed_seqs" else ""
                raise PackingError(
                    f"{name} is {value!r}; it must be a whole number of at least {least}{why}."
                )
            # NumPy integers would overflow in sums, and JSON cannot serialize them.
            object.__setattr__(self, name, int(value))
        if self.max_packed_tokens > MAX_TOKENS:
            raise PackingError(
                f"max_packed_tokens is {self.max_packed_tokens}; offsets are int32 and end at "
                f"{MAX_TOKENS}."
            )
        if self.max_packed_tokens % self.document_multiple:
            raise PackingError(
                f"max_packed_tokens is {self.max_packed_tokens}, not a multiple of "
                f"{self.document_multiple}, to which documents are padded (context_parallel_size "
                f"{self.context_parallel_size}, pad_seq_to_mult {self.pad_seq_to_mult}). The next "
                f"possible value is {self.padded_length(self.max_packed_tokens)}."
            )
        if self.pad_seq_to_mult > 1 and not self.counts_padding:
            raise PackingError(
                f"pad_seq_to_mult is {self.pad_seq_to_mult} without counts_padding: attention may "
                "leave rows between documents unwritten. Set counts_padding=True."
            )

    @property
    def max_documents(self) -> int:
        """Return the most documents of a microbatch: N without the dummy."""
        return self.max_packed_seqs - 1

    @property
    def document_multiple(self) -> int:
        """Return the rows that padded lengths are a multiple of: 2 C (1 if C is 1), and more."""
        pieces = 1 if self.context_parallel_size == 1 else 2 * self.context_parallel_size
        return math.lcm(pieces, self.pad_seq_to_mult)

    @property
    def tokens_per_rank(self) -> int:
        """Return the rows of a microbatch on one context-parallel rank: T / C."""
        return self.max_packed_tokens // self.context_parallel_size

    def padded_length(self, length: int) -> int:
        """Return the rows of a document of ``length`` tokens."""
        return -(-length // self.document_multiple) * self.document_multiple

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of each document, int64 [documents]."""
        return -(-lengths // self.document_multiple) * self.document_multiple

    def buckets(
        self, sizes: Sequence[float] = (1 / 4, 1 / 2), *, multiple_of: int = 1
    ) -> tuple[PackedShape, ...]:
        """Return this shape and shorter ones with the same N, largest first.

        A microbatch replays the graphs of the smallest shape that it fits. All have the same N, so
        the choice depends on tokens alone and ranks can agree on the largest of their choices.

        Args:
            sizes: the shorter sizes, as fractions of T up to 1, or as tokens above 1.
            multiple_of: each T is rounded up to a multiple of this and of `document_multiple`; see
                `bucket_multiple`.

        Raises:
            PackingError: a size is neither a fraction of T nor a whole number of tokens up to T, or
                T is not a multiple of ``multiple_of``.
        """
        most = self.max_packed_tokens
        multiple = math.lcm(self.document_multiple, multiple_of)
        for size in sizes:
            is_number = isinstance(size, Real)  # as NumPy's are
            if not is_number or not 0 < size <= most or (size > 1 and size != int(size)):
                raise PackingError(
                    f"A bucket of {size}: a bucket is a fraction of the {most} tokens, above 0 and "
                    f"at most 1, or a whole number of tokens up to {most}."
                )
        if most % multiple:
            raise PackingError(f"max_packed_tokens {most} is not a multiple of {multiple}.")
        parts = (size if size <= 1 else Fraction(int(size), most) for size in (*sizes, most))
        lengths = {max(1, math.ceil(most // multiple * part)) * multiple for part in parts}
        return tuple(replace(self, max_packed_tokens=n) for n in sorted(lengths, reverse=True))


def bucket_multiple(
    context_parallel_size: int, *, sequence_parallel_size: int = 1, in_fp8: bool = False
) -> int:
    """Return the multiple of rows for length buckets, in addition to that of documents.

    Args:
        context_parallel_size: context-parallel ranks that share the rows.
        sequence_parallel_size: tensor-parallel ranks that split each of these shares again.
        in_fp8: whether GEMMs run in FP8, which needs a multiple of 16 rows on each rank.
    """
    return context_parallel_size * sequence_parallel_size * (_FP8_ROWS if in_fp8 else 1)


def reason_not_to_fit(lengths: Lengths, shape: PackedShape) -> OverflowReason | None:
    """Return why documents do not fit a shape; None if they fit.

    Raises:
        PackingError: there is no document, or one has less than one token.
    """
    return overflow_reason(check_lengths(lengths), shape)


def overflow_reason(lengths: NDArray[np.int64], shape: PackedShape) -> OverflowReason | None:
    """Return `reason_not_to_fit` for lengths from `check_lengths`, int64 [documents]."""
    if lengths.max() > shape.max_packed_tokens:
        return OverflowReason.DOCUMENT_TOO_LONG
    if lengths.size > shape.max_documents:
        return OverflowReason.TOO_MANY_DOCUMENTS
    if shape.padded_lengths(lengths).sum() > shape.max_packed_tokens:
        return OverflowReason.TOO_MANY_TOKENS
    return None


def smallest_that_fits(lengths: Lengths, shapes: Iterable[PackedShape]) -> PackedShape | None:
    """Return the shape with the fewest tokens, then sequences, that the documents fit, or None.

    Raises:
        PackingError: there is no document, or one has less than one token.
    """
    checked = check_lengths(lengths)
    for shape in sorted(shapes, key=lambda s: (s.max_packed_tokens, s.max_packed_seqs)):
        if overflow_reason(checked, shape) is None:
            return shape
    return None

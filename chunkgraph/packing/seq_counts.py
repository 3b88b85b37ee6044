"""Choose the smaller numbers of sequences for which packed graphs are captured."""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.packing.shape import PackedShape

_SMALLEST_DEFAULT = 64
# Below this many rows per rank, 32 sequences are measurably faster than 64.
_SHORT_ROWS = 1024
# Transformer Engine rounds sequences up to 32, then to powers of two, and from 512 on to multiples
# of 512.
_FEWEST_LAUNCHED, _LINEAR_FROM = 32, 512


def default_seq_buckets(
    max_packed_seqs: int, num_tokens: int, num_ranks: int = 1, buckets: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the default: powers of two from 64 to half of the most; for short rows also 32.

    Attention launches work for every sequence, empty or not, and Transformer Engine rounds their
    number up to powers of two between 32 and 512 (``get_max_batch_size``). With 64 sequences, a
    microbatch of few documents costs 0.5% of a layer more than with 8 in 4096 rows and 1% more in
    2048. In 1024 rows and fewer it would cost 2% to 3% more, with deterministic kernels 12% to 14%,
    so 32 is a bucket too (`benchmarks/README.md`). All lengths share the buckets, so the shortest
    decides.

    Args:
        max_packed_seqs: the most sequences of a microbatch; 0: documents are not packed.
        num_tokens: tokens of the longest microbatch on all context-parallel ranks together.
        num_ranks: the context-parallel ranks that share it.
        buckets: shorter lengths, as fractions of ``num_tokens`` up to 1, or as tokens above 1.
    """
    tokens = min(size * num_tokens if size <= 1 else size for size in (1, *buckets))
    is_short = tokens / num_ranks <= _SHORT_ROWS and max_packed_seqs > _FEWEST_LAUNCHED
    counts, count = [_FEWEST_LAUNCHED] if is_short else [], _SMALLEST_DEFAULT
    while 2 * count <= max_packed_seqs:
        counts.append(count)
        count *= 2
    return tuple(counts)


def default_buckets_of_shape(shape: PackedShape, buckets: Sequence[float] = ()) -> tuple[int, ...]:
    """Return `default_seq_buckets` of a shape with these length buckets."""
    return default_seq_buckets(
        shape.max_packed_seqs, shape.max_packed_tokens, shape.context_parallel_size, buckets
    )


def num_launched(num_seqs: int) -> int:
    """Return the number of sequences for which attention launches work, given ``num_seqs``.

    Transformer Engine's rule for cuDNN (``get_max_batch_size``). It is also the largest number for
    which attention launches as much.
    """
    if num_seqs > _LINEAR_FROM:
        return -(-num_seqs // _LINEAR_FROM) * _LINEAR_FROM
    return max(_FEWEST_LAUNCHED, 1 << (num_seqs - 1).bit_length())

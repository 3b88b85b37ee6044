"""For how many sequences graphs of packed microbatches are captured, besides the most."""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.packing.microbatches import MicrobatchSizes
from chunkgraph.packing.recommend import quantile
from chunkgraph.packing.shape import PackedShape

__all__ = [
    "MANY",
    "default_of",
    "default_seq_buckets",
    "most_for_the_same",
    "seq_buckets_to_ask_for",
]

_LEAST = 64
# What Transformer Engine rounds fewer sequences up to, and the rows that it makes a difference in.
_FEWEST_LAUNCHED, _SHORT = 32, 1024
MANY = 0.9
"""Of the microbatches: fewer sequences are worth graphs if these need less than one in `_FEW`."""
_FEW = 2
# Graphs that fewer than these have documents few enough for are worth nothing.
_HARDLY_ANY = 0.01
# Transformer Engine rounds sequences up: to 32, to powers of two, from 512 on to multiples of it.
_LEAST_LAUNCHED, _LINEAR_FROM = 32, 512
# So many cost a percent of a layer more than the fewest at most, in rows that are not short.
_CHEAP = 64


def default_seq_buckets(
    max_packed_seqs: int, num_tokens: int, num_ranks: int = 1, buckets: Sequence[float] = ()
) -> tuple[int, ...]:
    """Powers of two from 64 on, up to half of the most; in short rows 32 too, if that is fewer.

    Attention's kernels are started for every sequence, empty or not, by numbers that Transformer
    Engine rounds up to powers of two between 32 and 512 (``get_max_batch_size``). So a microbatch
    of few documents costs at most what it does with 64 sequences: in 4096 rows half a percent of a
    layer more than with 8, in 2048 one; in 1024 and fewer it would be 2% and 3%, and 12% to 14%
    with deterministic kernels, so that there are graphs for 32 (`benchmarks/README.md`). Every
    length has the same numbers, so the shortest decides.

    Args:
        max_packed_seqs: the most sequences of a microbatch; 0: none are packed.
        num_tokens: of a microbatch of the greatest length, on all context-parallel ranks together.
        num_ranks: context-parallel ranks that share it.
        buckets: shorter lengths: parts of ``num_tokens`` up to 1, or tokens above 1.
    """
    tokens = min(size * num_tokens if size <= 1 else size for size in (1, *buckets))
    is_short = tokens / num_ranks <= _SHORT and max_packed_seqs > _FEWEST_LAUNCHED
    found, count = [_FEWEST_LAUNCHED] if is_short else [], _LEAST
    while 2 * count <= max_packed_seqs:
        found.append(count)
        count *= 2
    return tuple(found)


def seq_buckets_to_ask_for(sizes: MicrobatchSizes, shape: PackedShape) -> list[int]:
    """Fewer sequences to ask graphs for; [0]: for none, empty: those of the default will do.

    Args:
        sizes: The dataset's microbatches.
        shape: The shape that they are replayed in.
    """
    most, dummies = shape.max_packed_seqs, _dummies(shape)
    default = default_of(shape)
    needed = quantile(sizes.num_documents, MANY) + 1
    used = [n for n in default if n > quantile(sizes.num_documents, _HARDLY_ANY)]
    chosen = min(n for n in (*default, most) if n >= needed or n == most)
    fewer = _as_launched(needed + dummies) - dummies
    cost = max(_as_launched(fewer + dummies), min((*default, _CHEAP)))
    if _as_launched(chosen + dummies) > cost and _FEW * fewer <= most:
        return sorted({fewer, *(n - dummies for n in used if n - dummies >= _LEAST_LAUNCHED)})
    return [0] if default and not used else []


def default_of(shape: PackedShape, buckets: Sequence[float] = ()) -> tuple[int, ...]:
    """Fewer sequences that there are graphs for without asking, with such length buckets."""
    return default_seq_buckets(
        shape.max_packed_seqs, shape.max_packed_tokens, shape.context_parallel_size, buckets
    )


def most_for_the_same(shape: PackedShape) -> int:
    """The largest N for which attention's kernels are started as for that of a shape."""
    return _as_launched(shape.num_sequences) - _dummies(shape)


def _dummies(shape: PackedShape) -> int:
    """Those that a limit on documents brings on top of N; kernels see them too."""
    return shape.num_sequences - shape.max_packed_seqs


def _as_launched(num_seqs: int) -> int:
    """The most sequences for which attention's kernels are started as for ``num_seqs``.

    Transformer Engine's rule for cuDNN (``get_max_batch_size``).
    """
    if num_seqs > _LINEAR_FROM:
        return -(-num_seqs // _LINEAR_FROM) * _LINEAR_FROM
    return max(_LEAST_LAUNCHED, 1 << (num_seqs - 1).bit_length())

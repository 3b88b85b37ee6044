"""For how many sequences graphs are worth having, by what attention's kernels are started for."""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.config import default_seq_buckets
from chunkgraph.packing import MicrobatchSizes, PackedShape, quantile

__all__ = ["MANY", "default_of", "most_for_the_same", "seq_buckets_to_ask_for"]

MANY = 0.9
"""Of the microbatches: fewer sequences are worth graphs if these need less than one in `_FEW`."""
_FEW = 2
# Graphs that fewer than these have documents few enough for are worth nothing.
_HARDLY_ANY = 0.01
# Transformer Engine rounds sequences up: to 32, to powers of two, from 512 on to multiples of it.
_LEAST_LAUNCHED, _LINEAR_FROM = 32, 512
# So many cost a percent of a layer more than the fewest at most, in rows that are not short.
_CHEAP = 64


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

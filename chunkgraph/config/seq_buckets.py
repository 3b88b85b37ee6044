"""For how many sequences graphs of packed microbatches are captured, besides the most."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["default_seq_buckets"]

_LEAST = 64
# What Transformer Engine rounds fewer sequences up to, and the rows that it makes a difference in.
_FEWEST_LAUNCHED, _SHORT = 32, 1024


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

"""For how many sequences graphs of packed microbatches are captured, besides the most."""

from __future__ import annotations

__all__ = ["default_seq_buckets"]

_LEAST = 64
# What Transformer Engine rounds fewer sequences up to, and the rows that it makes a difference in.
_FEWEST_LAUNCHED, _SHORT = 32, 1024


def default_seq_buckets(max_packed_seqs: int, rows_per_rank: int) -> tuple[int, ...]:
    """Powers of two from 64 on, up to half of the most; in short rows 32 too, if that is fewer.

    Attention's kernels are started for every sequence, empty or not, by numbers that Transformer
    Engine rounds up to powers of two between 32 and 512 (``get_max_batch_size``). So a microbatch
    of few documents costs at most what it does with 64 sequences: in 4096 rows half a percent of a
    layer more than with 8, in 2048 one; in 1024 and fewer it would be 2% and 3%, and 12% to 14%
    with deterministic kernels, so that there are graphs for 32 (`benchmarks/README.md`).

    Args:
        max_packed_seqs: the most sequences of a microbatch; 0: none are packed.
        rows_per_rank: tokens of a microbatch that a context-parallel rank has.
    """
    is_short = rows_per_rank <= _SHORT and max_packed_seqs > _FEWEST_LAUNCHED
    found, count = [_FEWEST_LAUNCHED] if is_short else [], _LEAST
    while 2 * count <= max_packed_seqs:
        found.append(count)
        count *= 2
    return tuple(found)

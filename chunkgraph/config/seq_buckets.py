"""For how many sequences graphs of packed microbatches are captured, besides the most."""

from __future__ import annotations

__all__ = ["default_seq_buckets"]

_LEAST = 64


def default_seq_buckets(max_packed_seqs: int) -> tuple[int, ...]:
    """Powers of two from 64 on, up to half of the most; none for fewer than 128.

    Attention's kernels are started for every sequence, empty or not, by numbers that Transformer
    Engine rounds up to powers of two between 32 and 512 (``get_max_batch_size``). So a microbatch
    costs at most what it does without empty sequences, or with 64 (0.2% of a layer of 4096 rows
    more than with 8: `benchmarks/empty_sequences.json`).

    Args:
        max_packed_seqs: the most sequences of a microbatch; 0: none are packed.
    """
    found, count = [], _LEAST
    while 2 * count <= max_packed_seqs:
        found.append(count)
        count *= 2
    return tuple(found)

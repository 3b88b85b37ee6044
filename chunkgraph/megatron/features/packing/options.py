"""Options of packed sequences for `attach`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkgraph.packing import PackedShape

__all__ = ["PackingOptions"]


@dataclass(frozen=True)
class PackingOptions:
    """Packed sequences of fixed shapes, the same on every rank.

    Attributes:
        shape: The fixed shape of every microbatch.
        buckets: Shorter lengths that are captured too, as fractions of ``shape``'s length or in
            tokens. A microbatch must then have the rows of the smallest length that holds it
            (`MegatronChunkGraphs.buckets`), in eager steps too.
        seq_buckets: Smaller numbers of sequences that are captured too, for every length. A
            microbatch replays the graphs with the fewest sequences that hold its documents. Its
            offsets may have that number (`MegatronChunkGraphs.packed_shapes`), or the largest; the
            latter are cut, in eager training steps too. None for `default_seq_buckets`.
        fills_rows: Whether documents fill all rows of every microbatch, as in Megatron's data
            sets. Experts then take every row, as without chunk graphs, and a step that fits but
            has free rows is an error; a step that does not fit runs eagerly with any rows.
            Otherwise rows after the documents are kept from experts
            (`keep_padding_from_experts`), and the model takes ``padding_mask``.
    """

    shape: PackedShape
    buckets: Sequence[float] = ()
    seq_buckets: Sequence[int] | None = None
    fills_rows: bool = False

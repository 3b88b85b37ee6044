"""Options of packed sequences for `attach`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.packing import PackedShape
from chunkgraph.packing.seq_counts import default_seq_buckets

__all__ = ["PackingOptions", "packed_banks"]


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

    @property
    def seq_counts(self) -> Sequence[int]:
        """Return the numbers of sequences in ``seq_buckets``, or the default ones."""
        if self.seq_buckets is not None:
            return self.seq_buckets
        shape = self.shape
        return default_seq_buckets(
            shape.max_packed_seqs,
            shape.max_packed_tokens,
            shape.context_parallel_size,
            self.buckets,
        )


def packed_banks(
    packing: PackedShape | PackingOptions | PackedBanks | None, config: Any
) -> PackedBanks | None:
    """Create the banks for the argument ``packing`` of `attach`; None without packed sequences.

    Args:
        packing: See `attach`.
        config: Megatron's TransformerConfig.

    Raises:
        ConfigError: A number of sequences is out of range.
        PackingError: A length is not possible.
    """
    if packing is None or isinstance(packing, PackedBanks):
        return packing
    options = PackingOptions(packing) if isinstance(packing, PackedShape) else packing
    return PackedBanks.of_model(
        options.shape,
        options.buckets,
        options.seq_counts,
        config,
        fills_rows=options.fills_rows,
    )

"""How microbatches of packed sequences look, as `attach` is given it."""

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
        shape: the fixed shape of every microbatch.
        buckets: shorter lengths than that of ``shape`` that are captured too, as parts of it or in
            tokens. A microbatch is then given the rows of the smallest that holds it
            (`MegatronChunkGraphs.buckets`), in eager steps too.
        seq_buckets: fewer sequences than those of ``shape`` that are captured too, for every
            length. A microbatch replays the graphs of the fewest that hold its documents: its
            offsets may be made for these (`MegatronChunkGraphs.packed_shapes`), or for all, and are
            then cut, in eager training steps too. None: by `default_seq_buckets`.
        fills_rows: whether documents fill all rows of every microbatch, as Megatron's data sets
            make them. Experts then take every row, as they do without chunk graphs; a step that
            fits and has rows left over is an error (of one that does not fit, and runs eagerly, the
            rows are the caller's). Otherwise rows after the documents are kept from experts
            (`keep_padding_from_experts`), and the model takes ``padding_mask``.
    """

    shape: PackedShape
    buckets: Sequence[float] = ()
    seq_buckets: Sequence[int] | None = None
    fills_rows: bool = False

    @property
    def seq_counts(self) -> Sequence[int]:
        """The numbers of sequences in ``seq_buckets``, or the default ones."""
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
    """Make the banks of what `attach` is given as ``packing``; None without packed sequences.

    Args:
        packing: see `attach`.
        config: Megatron's TransformerConfig.

    Raises:
        ConfigError: a number of sequences is out of its range.
        PackingError: there are no such lengths.
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

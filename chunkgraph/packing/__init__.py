"""Pack documents of any lengths into arrays of fixed shapes, so that one graph serves all of them.

NumPy only: everything is computed on the host from lists of lengths. `pack` lays out one
microbatch, `reason_not_to_fit` checks beforehand whether it fits, `schedule_contexts` distributes
documents over microbatches that each have a context-parallel size, and `recommend` chooses a shape
for a dataset.
"""

from __future__ import annotations

from chunkgraph.packing.contexts import (
    ContextLimits,
    ContextMicrobatch,
    ContextSchedule,
    SmallestSizes,
    schedule_contexts,
)
from chunkgraph.packing.lengths import DocumentLengths, read_lengths, read_megatron_index
from chunkgraph.packing.offsets import check_offsets
from chunkgraph.packing.pack import PackedSequences, pack
from chunkgraph.packing.recommend import (
    MicrobatchSizes,
    Recommendation,
    ShapeOutcome,
    allowed_misfits,
    evaluate,
    fallback_share,
    fits,
    pack_in_order,
    padding_waste,
    quantile,
    recommend,
    sizes_of,
)
from chunkgraph.packing.shape import (
    OverflowReason,
    PackedShape,
    bucket_multiple,
    reason_not_to_fit,
    smallest_that_fits,
)

__all__ = [
    "ContextLimits",
    "ContextMicrobatch",
    "ContextSchedule",
    "DocumentLengths",
    "MicrobatchSizes",
    "OverflowReason",
    "PackedSequences",
    "PackedShape",
    "Recommendation",
    "ShapeOutcome",
    "SmallestSizes",
    "allowed_misfits",
    "bucket_multiple",
    "check_offsets",
    "evaluate",
    "fallback_share",
    "fits",
    "pack",
    "pack_in_order",
    "padding_waste",
    "quantile",
    "read_lengths",
    "read_megatron_index",
    "reason_not_to_fit",
    "recommend",
    "schedule_contexts",
    "sizes_of",
    "smallest_that_fits",
]

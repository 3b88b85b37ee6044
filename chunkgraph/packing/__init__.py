"""Documents of any lengths in arrays of fixed shapes, so that one graph serves every packing.

NumPy only: everything is computed on the host, from lists of lengths.
"""

from __future__ import annotations

from chunkgraph.packing.offsets import check_offsets, document_lengths
from chunkgraph.packing.pack import PackedSequences, pack
from chunkgraph.packing.shape import (
    OverflowReason,
    PackedShape,
    reason_not_to_fit,
    smallest_that_fits,
)

__all__ = [
    "OverflowReason",
    "PackedSequences",
    "PackedShape",
    "check_offsets",
    "document_lengths",
    "pack",
    "reason_not_to_fit",
    "smallest_that_fits",
]

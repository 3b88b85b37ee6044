"""The result of studying a dataset's lengths, for reports and plots."""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.packing.lengths import DocumentLengths
from chunkgraph.packing.microbatches import LongDocuments, MicrobatchSizes
from chunkgraph.packing.recommend import Recommendation
from chunkgraph.packing.shape import PackedShape

__all__ = ["PackingStudy"]


@dataclass(frozen=True, kw_only=True)
class PackingStudy:
    """A dataset's lengths, its microbatches, and the recommended shape."""

    path: str
    lengths: DocumentLengths
    num_long: int
    """Number of documents above the capacity, before truncating or splitting."""
    long_documents: LongDocuments
    sizes: MicrobatchSizes
    capacity: PackedShape
    is_default_capacity: bool
    microbatches_per_step: int
    target: float
    extra_seqs: tuple[int, ...]
    result: Recommendation

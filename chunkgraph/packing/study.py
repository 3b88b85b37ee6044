"""What a data set's lengths say about packed shapes, in one value."""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.packing.lengths import DocumentLengths
from chunkgraph.packing.microbatches import LongDocuments, MicrobatchSizes
from chunkgraph.packing.recommend import Recommendation
from chunkgraph.packing.shape import PackedShape

__all__ = ["PackingStudy"]


@dataclass(frozen=True, kw_only=True)
class PackingStudy:
    """All that is told of a dataset."""

    path: str
    lengths: DocumentLengths
    num_long: int
    """Documents above the capacity, before anything was done to them."""
    long_documents: LongDocuments
    sizes: MicrobatchSizes
    capacity: PackedShape
    is_default_capacity: bool
    microbatches_per_step: int
    target: float
    wanted_seqs: tuple[int, ...]
    result: Recommendation

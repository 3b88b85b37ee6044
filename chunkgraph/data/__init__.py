"""Read real text as packed training sequences: NumPy only, and reproducible by seed."""

from __future__ import annotations

from chunkgraph.data.counts import check_counts
from chunkgraph.data.documents import DocumentRow, Documents
from chunkgraph.data.drawn import DrawnDocuments
from chunkgraph.data.packed import PackedBatch, PackedText
from chunkgraph.data.text import read_documents, shipped_text
from chunkgraph.data.vocabulary import END_OF_DOCUMENT, NUM_TOKENS

__all__ = [
    "END_OF_DOCUMENT",
    "NUM_TOKENS",
    "DocumentRow",
    "Documents",
    "DrawnDocuments",
    "PackedBatch",
    "PackedText",
    "check_counts",
    "read_documents",
    "shipped_text",
]

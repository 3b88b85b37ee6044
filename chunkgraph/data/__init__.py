"""Read real text as training sequences or packed documents: NumPy only, reproducible by seed."""

from __future__ import annotations

from chunkgraph.data.counts import DrawnDocuments, check_counts
from chunkgraph.data.text import (
    END_OF_DOCUMENT,
    NUM_TOKENS,
    DocumentRow,
    Documents,
    PackedText,
    read_documents,
)

__all__ = [
    "END_OF_DOCUMENT",
    "NUM_TOKENS",
    "DocumentRow",
    "Documents",
    "DrawnDocuments",
    "PackedText",
    "check_counts",
    "read_documents",
]

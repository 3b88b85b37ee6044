"""The paged stash: store the rows in use of experts' saved activations in shared pages.

Experts whose input has a fixed shape save tensors of the largest size for the backward. The stash
keeps only the rows that hold a token between a slot's forward and its backward, in pages that all
layers, chunks and slots of a rank share. The number of rows stays on the device.
"""

from chunkgraph.memory.stash.paged_stash import PagedStash, Stashed, StashStatus
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.saving import PageMeter, Saving

__all__ = [
    "PageMeter",
    "PagedStash",
    "RowLayout",
    "RowsInUse",
    "Saving",
    "StashStatus",
    "Stashed",
]

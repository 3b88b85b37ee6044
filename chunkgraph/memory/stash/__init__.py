"""The paged stash: saved activations of experts, only the rows in use, in pages shared by all.

Experts whose input has a fixed shape save tensors of their largest size for the backward. In the
stash only the rows that hold a token are kept between a slot's forward and its backward, in pages
that all layers, chunks and slots of a rank share. How many rows that are stays on the device.
"""

from chunkgraph.memory.stash.arena import Arena, ArenaSize, StashStatus
from chunkgraph.memory.stash.kernels import KernelChoice, StashKernels, new_kernels
from chunkgraph.memory.stash.meter import PageMeter, most_at_once
from chunkgraph.memory.stash.options import StashOptions
from chunkgraph.memory.stash.paged_stash import PagedStash, Stashed
from chunkgraph.memory.stash.readout import StashReadout, StepReadout
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.saving import MIN_ROW_BYTES, Saving, SavingMode

__all__ = [
    "MIN_ROW_BYTES",
    "Arena",
    "ArenaSize",
    "KernelChoice",
    "PageMeter",
    "PagedStash",
    "RowLayout",
    "RowsInUse",
    "Saving",
    "SavingMode",
    "StashKernels",
    "StashOptions",
    "StashReadout",
    "StashStatus",
    "Stashed",
    "StepReadout",
    "most_at_once",
    "new_kernels",
]

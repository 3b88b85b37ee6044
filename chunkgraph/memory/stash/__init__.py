"""The paged stash: store the rows in use of experts' saved activations in shared pages.

Experts whose input has a fixed shape save tensors of the largest size for the backward. The stash
keeps only the rows that hold a token between a slot's forward and its backward, in pages that all
layers, chunks and slots of a rank share. The number of rows stays on the device.
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

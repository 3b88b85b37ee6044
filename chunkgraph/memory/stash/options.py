"""How a rank's stash is sized, and what follows when it runs out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.memory.stash.kernels import KernelChoice

__all__ = ["StashOptions"]


@dataclass(frozen=True, kw_only=True)
class StashOptions:
    """How a rank's stash is sized, and what follows when it runs out.

    Attributes:
        page_bytes: of a page, a multiple of 16, no smaller than a row of a saved tensor.
        headroom: pages taken, as a multiple of what eager steps showed to be needed.
        initial_bytes: of the pages at first; None: as the eager steps before the capture show.
        max_bytes: the most that pages on the device may grow to; None: no limit.
        spill_bytes: of pages in pinned memory of the host, for what finds none on the device.
        on_overflow: what follows a step in which pages ran out: ``rerun`` it eagerly, or ``raise``.
        max_recaptures: how many times more pages are then taken and graphs captured anew.
        kernels: see `new_kernels`.
    """

    page_bytes: int = 65536
    headroom: float = 1.1
    initial_bytes: int | None = None
    max_bytes: int | None = None
    spill_bytes: int = 0
    on_overflow: Literal["rerun", "raise"] = "rerun"
    max_recaptures: int = 2
    kernels: KernelChoice = "auto"

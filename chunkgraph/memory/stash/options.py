"""How a rank's stash is sized, and what follows when it runs out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.arena import ArenaSize
from chunkgraph.memory.stash.kernels import KernelChoice

__all__ = ["OnOverflow", "StashOptions"]

OnOverflow = Literal["rerun", "raise"]
"""What follows a step in which pages ran out."""


@dataclass(frozen=True, kw_only=True)
class StashOptions:
    """How a rank's stash is sized, and what follows when it runs out.

    Attributes:
        page_bytes: of a page, a multiple of 16, no smaller than a row of a saved tensor.
        headroom: pages taken, as a multiple of what eager steps showed to be needed. What is over
            1 is doubled with every capture after a step that ran out.
        initial_bytes: of the pages at first; None: as the eager steps before the capture show.
        max_bytes: the most that pages on the device may grow to; None: no limit.
        spill_bytes: of pages in pinned memory of the host, for what finds none on the device.
        on_overflow: what follows a step in which pages ran out: ``rerun`` it eagerly, or ``raise``.
        max_recaptures: how many times more pages are then taken and graphs captured anew.
        kernels: see `new_kernels`.
        prefetches: whether a backward reloads a layer's tensors on a stream beside, while the layer
            after it runs.
        skips_single_slots: whether a chunk with one slot, each of whose backwards follows its
            forward at once, keeps what its experts save where it is.

    Raises:
        ConfigError: a value is out of its range.
    """

    page_bytes: int = 65536
    headroom: float = 1.1
    initial_bytes: int | None = None
    max_bytes: int | None = None
    spill_bytes: int = 0
    on_overflow: OnOverflow = "rerun"
    max_recaptures: int = 2
    kernels: KernelChoice = "auto"
    prefetches: bool = False
    skips_single_slots: bool = False

    def __post_init__(self) -> None:
        ArenaSize(self.page_bytes, 0)  # raises
        for name in ("initial_bytes", "max_bytes", "spill_bytes", "max_recaptures"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"The stash's {name} is {value}; it must be 0 or greater.")
        if not (self.headroom > 0 and math.isfinite(self.headroom)):
            raise ConfigError(f"The stash's headroom is {self.headroom}; it must be above 0.")
        for name, known in (("on_overflow", OnOverflow), ("kernels", KernelChoice)):
            if getattr(self, name) not in get_args(known):
                choices = ", ".join(map(repr, get_args(known)))
                raise ConfigError(
                    f"The stash's {name} is {getattr(self, name)!r}; it is one of {choices}."
                )

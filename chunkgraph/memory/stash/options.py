"""Options of a rank's stash: its size, and the policy when it runs out of pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.arena import ArenaSize
from chunkgraph.memory.stash.kernels import KernelChoice

__all__ = ["OnOverflow", "StashOptions"]

OnOverflow = Literal["rerun", "raise"]
"""Policy for a step that ran out of pages."""


@dataclass(frozen=True, kw_only=True)
class StashOptions:
    """Options of a rank's stash: its size, and the policy when it runs out of pages.

    Attributes:
        page_bytes: Bytes of a page: a multiple of 16, at least one row of a saved tensor.
        headroom: Number of pages as a multiple of the number that eager steps need. The part above
            1 doubles with every capture after a step that ran out.
        initial_bytes: Bytes of the pages in the first capture; None to measure them in the eager
            steps before it.
        max_bytes: Maximum bytes of the device pages; None for no limit.
        spill_bytes: Bytes of the pages in pinned host memory, used when no device page is free.
        on_overflow: Policy for a step that ran out of pages: ``rerun`` it eagerly, or ``raise``.
        max_recaptures: Maximum number of captures with more pages.
        kernels: See `new_kernels`.
        prefetches: Whether a backward reloads a layer's tensors on a side stream while the
            following layer's backward runs.
        skips_single_slots: Whether a chunk with one slot, whose backwards directly follow their
            forwards, does not stash.

    Raises:
        ConfigError: A value is out of its range.
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
        for name, literal in (("on_overflow", OnOverflow), ("kernels", KernelChoice)):
            if getattr(self, name) not in get_args(literal):
                choices = ", ".join(map(repr, get_args(literal)))
                raise ConfigError(
                    f"The stash's {name} is {getattr(self, name)!r}; it is one of {choices}."
                )

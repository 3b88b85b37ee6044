"""Options of a rank's stash."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.arena import PAGE_ALIGNMENT_BYTES
from chunkgraph.memory.stash.kernels import KernelChoice

__all__ = ["StashOptions"]


@dataclass(frozen=True, kw_only=True)
class StashOptions:
    """The size of a stash, and the reaction when it runs out.

    Attributes:
        page_bytes: Bytes per page, a multiple of 16 and no smaller than a row; about 16 rows per
            page waste little.
        headroom: Pages to allocate, as a multiple of what the eager steps before the capture used.
        initial_bytes: Bytes of pages to begin with; None: derived from the eager steps.
        max_bytes: Bytes that the pages may grow to; None: no limit.
        spill_bytes: Bytes of pages in host memory, for rows that do not fit on the device.
        on_overflow: After a step that ran out of pages: rerun it eagerly, or raise an error. The
            optimizer never sees the gradients of the failed step.
        max_recaptures: How often to add pages and recapture after such a step; later ones only run
            eagerly.
        prefetches: Whether to reload a layer's rows on a second stream while the backward of the
            next layer runs, which takes the memory of one more layer.
        kernels: See `new_kernels`.
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
    on_overflow: Literal["rerun", "raise"] = "rerun"
    max_recaptures: int = 2
    prefetches: bool = False
    kernels: KernelChoice = "auto"
    skips_single_slots: bool = False

    def __post_init__(self) -> None:
        size = self.page_bytes
        if size < PAGE_ALIGNMENT_BYTES or size % PAGE_ALIGNMENT_BYTES:
            raise ConfigError(
                f"page_bytes is {size}; it must be a multiple of {PAGE_ALIGNMENT_BYTES}."
            )
        if not (math.isfinite(self.headroom) and self.headroom > 0):
            raise ConfigError(f"headroom is {self.headroom}; it must be greater than 0.")
        for name in ("initial_bytes", "max_bytes", "spill_bytes", "max_recaptures"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or greater.")
        words = {"on_overflow": ("rerun", "raise"), "kernels": get_args(KernelChoice)}
        for name, choices in words.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(map(repr, choices))}."
                )

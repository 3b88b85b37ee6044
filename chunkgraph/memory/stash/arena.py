"""The memory of a stash: pages, the list of free ones, and what is counted, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkgraph.errors import ConfigError

__all__ = ["PAGE_ALIGNMENT_BYTES", "Arena", "ArenaSize", "StashStatus"]

PAGE_ALIGNMENT_BYTES = 16

_FREE, _FREE_SPILL, _WANTED, _PEAK, _SHORT = range(5)


@dataclass(frozen=True)
class ArenaSize:
    """How large an arena is.

    Attributes:
        page_bytes: of a page, a multiple of 16.
        num_pages: on the device.
        num_spill_pages: in host memory, used when the device has none left.

    Raises:
        ConfigError: a size that cannot be.
    """

    page_bytes: int
    num_pages: int
    num_spill_pages: int = 0

    def __post_init__(self) -> None:
        if self.page_bytes < PAGE_ALIGNMENT_BYTES or self.page_bytes % PAGE_ALIGNMENT_BYTES:
            raise ConfigError(
                f"A stash page of {self.page_bytes} bytes: it must be a multiple of "
                f"{PAGE_ALIGNMENT_BYTES} bytes."
            )
        if self.num_pages < 0 or self.num_spill_pages < 0:
            raise ConfigError(
                f"A stash of {self.num_pages} pages and {self.num_spill_pages} spill pages: "
                "neither can be negative."
            )

    @property
    def total_pages(self) -> int:
        """On the device and on the host."""
        return self.num_pages + self.num_spill_pages

    @property
    def device_bytes(self) -> int:
        """Of all pages on the device, the one for rows that found no room included."""
        return (self.num_pages + 1) * self.page_bytes


@dataclass(frozen=True)
class StashStatus:
    """What a stash counted, as read on the host.

    Attributes:
        num_free_pages: on the device.
        num_free_spill_pages: on the host.
        num_wanted_pages: of what is stashed now, whether it found room or not.
        num_peak_pages: the most of those since the last reset of the peak.
        num_short: tensors that found no room since the last reset.
    """

    num_free_pages: int
    num_free_spill_pages: int
    num_wanted_pages: int
    num_peak_pages: int
    num_short: int


class Arena:
    """Pages and their free lists. Device pages come first, then spill pages, then no page.

    The memory lies outside all graph pools, and stays where it is as long as graphs use it.

    Args:
        size: see `ArenaSize`.
        device: where the pages lie; spill pages lie in pinned memory of the host if it is a GPU.

    Attributes:
        pages: uint8 [num_pages + 1, page_bytes]; the last is written by rows without a page.
        spill: likewise on the host, or None.
        stack: int32 [num_pages + 1]: the free pages, in front; the last cell is written by what is
            not to be written.
        spill_stack: likewise, or None.
        state: int64 [5]: free pages, free spill pages, pages wanted now, the most of them, and how
            many tensors found no room.
    """

    def __init__(self, size: ArenaSize, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.pages = torch.zeros(
            size.num_pages + 1, size.page_bytes, dtype=torch.uint8, device=device
        )
        self.stack = torch.zeros(size.num_pages + 1, dtype=torch.int32, device=device)
        self.state = torch.zeros(5, dtype=torch.int64, device=device)
        self.spill: torch.Tensor | None = None
        self.spill_stack: torch.Tensor | None = None
        if size.num_spill_pages:
            shape = (size.num_spill_pages + 1, size.page_bytes)
            pinned = device.type == "cuda"
            self.spill = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned)
            self.spill_stack = torch.zeros(
                size.num_spill_pages + 1, dtype=torch.int32, device=device
            )
        self.reset()

    @property
    def no_page(self) -> int:
        """The number in a page table that means: this row has no page."""
        return self.size.total_pages

    @property
    def free(self) -> torch.Tensor:
        """Free pages on the device, shape [1]."""
        return self.state[_FREE : _FREE + 1]

    @property
    def free_spill(self) -> torch.Tensor:
        """Free pages on the host, shape [1]."""
        return self.state[_FREE_SPILL : _FREE_SPILL + 1]

    @property
    def wanted(self) -> torch.Tensor:
        """Pages of what is stashed now, shape [1]."""
        return self.state[_WANTED : _WANTED + 1]

    @property
    def peak(self) -> torch.Tensor:
        """The most of those, shape [1]."""
        return self.state[_PEAK : _PEAK + 1]

    @property
    def short(self) -> torch.Tensor:
        """Tensors that found no room, shape [1]."""
        return self.state[_SHORT : _SHORT + 1]

    def reset(self) -> None:
        """All pages are free. Only where nothing is stashed, or what is will not be read."""
        size = self.size
        self.stack.copy_(torch.arange(size.num_pages + 1, dtype=torch.int32))
        if self.spill_stack is not None:
            numbers = torch.arange(size.num_spill_pages + 1, dtype=torch.int32)
            self.spill_stack.copy_(numbers + size.num_pages)
        self.state.copy_(torch.tensor([size.num_pages, size.num_spill_pages, 0, 0, 0]))

    def forget_overflow(self) -> None:
        """Before a step: nothing has found no room yet, and the peak is what is stashed now."""
        self.short.zero_()
        self.peak.copy_(self.wanted)

    def status(self) -> StashStatus:
        """Wait for the device and read what was counted."""
        return StashStatus(*self.state.tolist())

"""The memory of a stash: its pages, their free lists and its counts, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkgraph.errors import ConfigError

__all__ = ["PAGE_ALIGNMENT_BYTES", "Arena", "ArenaSize", "StashStatus"]

PAGE_ALIGNMENT_BYTES = 16

_FREE, _FREE_SPILL, _REQUIRED, _PEAK, _SHORT = range(5)


@dataclass(frozen=True)
class ArenaSize:
    """The size of an arena.

    Attributes:
        page_bytes: Bytes of a page, a multiple of 16.
        num_pages: Number of pages on the device.
        num_spill_pages: Number of pages in host memory, used when no device page is free.

    Raises:
        ConfigError: A size is invalid.
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
        """Return the number of pages on the device and the host together."""
        return self.num_pages + self.num_spill_pages

    @property
    def device_bytes(self) -> int:
        """Return the bytes of all device pages, including the overflow page."""
        return (self.num_pages + 1) * self.page_bytes


@dataclass(frozen=True)
class StashStatus:
    """The counts of a stash on the host.

    Attributes:
        num_free_pages: Free pages on the device.
        num_free_spill_pages: Free pages on the host.
        num_required_pages: Pages of all tensors in the stash now, including tensors without room.
        num_peak_pages: Maximum of ``num_required_pages`` since the last reset of the peak.
        num_short: Number of tensors without room since the last reset.
    """

    num_free_pages: int
    num_free_spill_pages: int
    num_required_pages: int
    num_peak_pages: int
    num_short: int


class Arena:
    """Pages and their free lists. Page numbers count device pages, then spill pages, then no page.

    The memory lies outside all graph pools and has fixed addresses as long as graphs use it.

    Args:
        size: See `ArenaSize`.
        device: Device of the pages. If it is a GPU, spill pages lie in pinned host memory.

    Attributes:
        pages: Uint8 [num_pages + 1, page_bytes]; the last one is the overflow page, which rows
            without a page write.
        spill: Likewise on the host; None without spill pages.
        stack: Int32 [num_pages + 1]: the free pages come first; masked writes go to the last cell.
        spill_stack: Likewise for spill pages; None without them.
        state: Int64 [5]: free pages, free spill pages, required pages, their peak, and the number
            of tensors without room.
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
        """Return the entry of a page table for a row without a page."""
        return self.size.total_pages

    @property
    def free(self) -> torch.Tensor:
        """Return the number of free pages on the device, a view of shape [1]."""
        return self.state[_FREE : _FREE + 1]

    @property
    def free_spill(self) -> torch.Tensor:
        """Return the number of free pages on the host, a view of shape [1]."""
        return self.state[_FREE_SPILL : _FREE_SPILL + 1]

    @property
    def required(self) -> torch.Tensor:
        """Return the number of pages of all tensors in the stash, a view of shape [1]."""
        return self.state[_REQUIRED : _REQUIRED + 1]

    @property
    def peak(self) -> torch.Tensor:
        """Return the peak of `required`, a view of shape [1]."""
        return self.state[_PEAK : _PEAK + 1]

    @property
    def short(self) -> torch.Tensor:
        """Return the number of tensors without room, a view of shape [1]."""
        return self.state[_SHORT : _SHORT + 1]

    def reset(self) -> None:
        """Free all pages; no stashed tensor may be read afterwards."""
        size = self.size
        self.stack.copy_(torch.arange(size.num_pages + 1, dtype=torch.int32))
        if self.spill_stack is not None:
            numbers = torch.arange(size.num_spill_pages + 1, dtype=torch.int32)
            self.spill_stack.copy_(numbers + size.num_pages)
        self.state.copy_(torch.tensor([size.num_pages, size.num_spill_pages, 0, 0, 0]))

    def forget_overflow(self) -> None:
        """Reset the shortage and the peak, before a step."""
        self.short.zero_()
        self.peak.copy_(self.required)

    def status(self) -> StashStatus:
        """Wait for the device and return the counts."""
        return StashStatus(*self.state.tolist())

"""The paged stash: copy rows in use to pages, and reload them as whole tensors.

The stash depends on no schedule and no slots. A stashed tensor's page table is an ordinary tensor,
so in a captured forward it lies in the slot's memory, where the slot's captured backward reads it.
So every slot has its own pages, for any set of slots in flight and any order of replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.memory.stash.arena import Arena, ArenaSize
from chunkgraph.memory.stash.kernels import KernelChoice, new_kernels
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["PagedStash", "Reload", "Stashed", "row_layout"]


@dataclass(frozen=True)
class Stashed:
    """A tensor in the stash.

    Attributes:
        ticket: Page table of its rows.
        rows: Its rows in use.
        layout: Layout of the rows in pages.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    ticket: Ticket
    rows: RowsInUse
    layout: RowLayout
    shape: torch.Size
    dtype: torch.dtype


class Reload:
    """A reload of a tensor, possibly on another stream.

    Args:
        into: The tensor that receives the rows.
        ready: Event after the copy; None if the copy runs on the current stream.
    """

    def __init__(self, into: torch.Tensor, ready: torch.cuda.Event | None = None) -> None:
        self._into = into
        self._ready = ready

    def tensor(self) -> torch.Tensor:
        """Return the tensor; the current stream waits for the copy."""
        if self._ready is not None:
            torch.cuda.current_stream(self._into.device).wait_event(self._ready)
            self._ready = None
        return self._into


class PagedStash:
    """Stash tensors in pages that all layers, chunks and slots of a rank share.

    All methods except `reload_ahead` run on the current stream: stash and reload on one stream, or
    order the streams.

    Args:
        size: Size of the arena.
        device: Device of the arena.
        kernels: See `new_kernels`.

    Raises:
        ConfigError: The kernels are not available, or cannot spill to the host.

    Attributes:
        arena: The pages and their counts.
    """

    def __init__(
        self, size: ArenaSize, device: torch.device, kernels: KernelChoice = "auto"
    ) -> None:
        self._kernels = new_kernels(device, kernels)
        if size.num_spill_pages and device.type == "cuda" and not self._kernels.reads_host_pages:
            raise ConfigError(
                f"{size.num_spill_pages} spill pages with the stash's reference kernels on "
                f"{device}: only its Triton kernels access pages in host memory. Install triton "
                "and choose kernels 'auto', or set spill_bytes to 0."
            )
        self.arena = Arena(size, device)
        aside = device.type == "cuda" and self._kernels.loads_without_memory
        self._side = torch.cuda.Stream(device) if aside else None

    def stash(self, tensor: torch.Tensor, rows: RowsInUse) -> Stashed:
        """Copy the rows in use of a contiguous tensor to pages.

        If too few pages are free, nothing is stored, the device counts the shortage
        (`Arena.short`), and a reload returns zeros.

        Args:
            tensor: A tensor of shape [rows.num_rows, ...].
            rows: Its rows in use.

        Raises:
            ConfigError: A page is smaller than a row.
        """
        values = tensor.detach()
        layout = row_layout(values, self.arena.size.page_bytes)
        ticket = self._kernels.take(self.arena, rows, layout)
        self._kernels.store(self.arena, values, rows, layout, ticket)
        return Stashed(ticket, rows, layout, values.shape, values.dtype)

    def reload(self, stashed: Stashed) -> torch.Tensor:
        """Return the tensor in new memory; rows that were not in use are zero."""
        into = torch.empty(stashed.shape, dtype=stashed.dtype, device=self.arena.device)
        self._kernels.load(self.arena, into, stashed.rows, stashed.layout, stashed.ticket)
        return into

    def reload_now(self, stashed: Stashed) -> Reload:
        """Reload a tensor on the current stream."""
        return Reload(self.reload(stashed))

    def reload_ahead(self, several: Sequence[Stashed]) -> list[Reload]:
        """Start to reload tensors on a side stream; the current stream does not wait.

        The current stream allocates their memory. One of them must be used (`Reload.tensor`)
        before the pages of any are freed, since that orders the streams. Without Triton's kernels
        the reload runs on the current stream.
        """
        if self._side is None or not several:
            return [self.reload_now(stashed) for stashed in several]
        device = self.arena.device
        into = [torch.empty(s.shape, dtype=s.dtype, device=device) for s in several]
        self._side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._side):
            for tensor, stashed in zip(into, several, strict=True):
                self._kernels.load(self.arena, tensor, stashed.rows, stashed.layout, stashed.ticket)
            ready = torch.cuda.Event()
            ready.record(self._side)
        return [Reload(tensor, ready) for tensor in into]

    def give_back(self, stashed: Stashed) -> None:
        """Free the pages of a tensor; call this once for each `stash`."""
        self._kernels.give_back(self.arena, stashed.ticket)


def row_layout(tensor: torch.Tensor, page_bytes: int) -> RowLayout:
    """Return the layout in pages of the rows (first dimension) of ``tensor``.

    Raises:
        ConfigError: A page is smaller than a row.
    """
    num_rows = tensor.shape[0]
    row_bytes = tensor.numel() // num_rows * tensor.element_size()
    if row_bytes > page_bytes:
        raise ConfigError(
            f"A row of {row_bytes} bytes (of a saved tensor of shape {tuple(tensor.shape)}, "
            f"{tensor.dtype}) does not fit into a stash page of {page_bytes} bytes. "
            "Increase page_bytes; 64 rows per page waste little."
        )
    return RowLayout(num_rows, row_bytes, page_bytes)

"""The paged stash: rows in use go to pages, and come back as whole tensors.

It knows no schedule and no slots. A stashed tensor's page table is an ordinary tensor, so that in a
captured forward it lies in the memory of the slot, and the slot's captured backward finds it there:
whichever slots are in flight, in whatever order they are replayed, each has its own pages.
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
        ticket: where its rows are.
        rows: which of them are in use.
        layout: of the rows in pages.
        shape: of the tensor.
        dtype: of the tensor.
    """

    ticket: Ticket
    rows: RowsInUse
    layout: RowLayout
    shape: torch.Size
    dtype: torch.dtype


class Reload:
    """A tensor that comes back, perhaps on a stream of its own.

    Args:
        into: where to.
        ready: recorded behind the copy; None: the copy is ordered already.
    """

    def __init__(self, into: torch.Tensor, ready: torch.cuda.Event | None = None) -> None:
        self._into = into
        self._ready = ready

    def tensor(self) -> torch.Tensor:
        """The tensor; what the current stream does from now on finds it there."""
        if self._ready is not None:
            torch.cuda.current_stream(self._into.device).wait_event(self._ready)
            self._ready = None
        return self._into


class PagedStash:
    """Pages shared by all layers, chunks and slots of a rank.

    Everything but `reload_ahead` runs on the current stream: stash and reload on one stream, or
    order them.

    Args:
        size: of its memory.
        device: where it lies.
        kernels: see `new_kernels`.

    Raises:
        ConfigError: these kernels cannot be had, or cannot spill to the host.

    Attributes:
        arena: its memory.
    """

    def __init__(
        self, size: ArenaSize, device: torch.device, kernels: KernelChoice = "auto"
    ) -> None:
        self._kernels = new_kernels(device, kernels)
        if size.num_spill_pages and device.type == "cuda" and not self._kernels.reads_host_pages:
            raise ConfigError(
                f"{size.num_spill_pages} spill pages with the stash's reference kernels on "
                f"{device}: only its Triton kernels reach pages in the memory of the host. Install "
                "triton and choose kernels 'auto', or set spill_bytes to 0."
            )
        self.arena = Arena(size, device)
        aside = device.type == "cuda" and self._kernels.loads_without_memory
        self._side = torch.cuda.Stream(device) if aside else None

    def stash(self, tensor: torch.Tensor, rows: RowsInUse) -> Stashed:
        """Copy the rows in use of a contiguous tensor to pages.

        Where too few pages are free nothing is stored, the shortage is counted on the device
        (`Arena.short`), and a reload gives zeros.

        Args:
            tensor: shape [rows.num_rows, ...].
            rows: which of them are in use.

        Raises:
            ConfigError: a page is smaller than a row.
        """
        values = tensor.detach()
        layout = row_layout(values, self.arena.size.page_bytes)
        ticket = self._kernels.take(self.arena, rows, layout)
        self._kernels.store(self.arena, values, rows, layout, ticket)
        return Stashed(ticket, rows, layout, values.shape, values.dtype)

    def reload(self, stashed: Stashed) -> torch.Tensor:
        """The tensor, in memory of its own; rows that were not in use are zero."""
        into = torch.empty(stashed.shape, dtype=stashed.dtype, device=self.arena.device)
        self._kernels.load(self.arena, into, stashed.rows, stashed.layout, stashed.ticket)
        return into

    def reload_now(self, stashed: Stashed) -> Reload:
        """`reload`, ordered like everything else."""
        return Reload(self.reload(stashed))

    def reload_ahead(self, several: Sequence[Stashed]) -> list[Reload]:
        """Start to reload tensors on a stream beside the current one, which is not held up.

        Their memory is of the current stream. One of them must be taken (`Reload.tensor`) before
        any is given back: that is what orders the streams. Without Triton's kernels it is done at
        once.
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
        """Free the pages; once for each `stash`."""
        self._kernels.give_back(self.arena, stashed.layout, stashed.ticket)


def row_layout(tensor: torch.Tensor, page_bytes: int) -> RowLayout:
    """How the rows of ``tensor`` (its first dimension) lie in pages.

    Raises:
        ConfigError: a page is smaller than a row.
    """
    num_rows = tensor.shape[0]
    row_bytes = tensor.numel() // num_rows * tensor.element_size()
    if row_bytes > page_bytes:
        raise ConfigError(
            f"A row of {row_bytes} bytes (of a saved tensor of shape {tuple(tensor.shape)}, "
            f"{tensor.dtype}) does not fit into a stash page of {page_bytes} bytes. "
            "Make page_bytes larger; 64 rows to a page waste little."
        )
    return RowLayout(num_rows, row_bytes, page_bytes)

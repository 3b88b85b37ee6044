"""The paged stash: copy rows in use to pages, and reload them as whole tensors.

The stash depends on no schedule and no slots. A stashed tensor's page table is an ordinary tensor,
so in a captured forward it lies in the slot's memory, where the slot's captured backward reads it.
So every slot has its own pages, for any set of slots in flight and any order of replays.

Four operators move rows: on a GPU Triton's kernels; on a CPU, and without Triton, the functions
below, which give the same tables and bits. The CPU recorder records each like one of torch's.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import wraps
from typing import Any

import torch
from torch import library

from chunkgraph.memory.stash.rows import RowLayout, RowsInUse

_operators: Any = torch.ops.chunkgraph


@dataclass(frozen=True)
class StashStatus:
    """The counts of a stash on the host.

    Attributes:
        num_free_pages: Free pages.
        num_required_pages: Pages of all tensors in the stash now, including tensors without room.
        num_peak_pages: Maximum of ``num_required_pages`` since the last reset of the peak.
        num_short: Number of tensors without room since the last reset.
    """

    num_free_pages: int
    num_required_pages: int
    num_peak_pages: int
    num_short: int


@dataclass(frozen=True)
class Stashed:
    """A tensor in the stash.

    If a captured forward stashes it, ``table`` and ``taken`` lie in the slot's memory.

    Attributes:
        table: Int32 [max_pages]: page numbers; those in use come first.
        taken: Int64 [2]: required pages, allocated pages.
        rows: Its rows in use.
        layout: Layout of the rows in pages.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    table: torch.Tensor
    taken: torch.Tensor
    rows: RowsInUse
    layout: RowLayout
    shape: torch.Size
    dtype: torch.dtype


class PagedStash:
    """Stash tensors in pages that all layers, chunks and slots of a rank share.

    The memory lies outside all graph pools and has fixed addresses as long as graphs use it. All
    methods run on the current stream: stash and reload on one stream, or order the streams. They
    can be captured: shapes are fixed, and the host reads nothing.

    Args:
        page_bytes: Bytes of a page, a multiple of 8.
        num_pages: Number of pages.
        device: Device of the pages.

    Attributes:
        pages: Uint8 [num_pages + 1, page_bytes]; the last one is the overflow page, which rows
            without a page write.
        stack: Int32 [num_pages + 1]: the free pages come first; masked writes go to the last cell.
        state: Int64 [4]: the counts, in the order of `StashStatus`.
    """

    def __init__(self, page_bytes: int, num_pages: int, device: torch.device) -> None:
        self.page_bytes, self.num_pages = page_bytes, num_pages
        self.pages = torch.zeros(num_pages + 1, page_bytes, dtype=torch.uint8, device=device)
        self.stack = torch.zeros(num_pages + 1, dtype=torch.int32, device=device)
        self.state = torch.zeros(4, dtype=torch.int64, device=device)
        is_cuda = self.state.is_cuda
        self._sent = torch.zeros(4, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None
        self.reset()

    def reset(self) -> None:
        """Free all pages; no stashed tensor may be read afterwards."""
        self.stack.copy_(torch.arange(self.num_pages + 1, dtype=torch.int32, device="cpu"))
        self.state.copy_(torch.tensor([self.num_pages, 0, 0, 0], device="cpu"))

    def forget_overflow(self) -> None:
        """Reset the shortage and the peak, before a step."""
        _, required, peak, short = self.state.split(1)
        short.zero_()
        peak.copy_(required)

    def status(self) -> StashStatus:
        """Wait for the device and return the counts."""
        return StashStatus(*self.state.tolist())

    def send_status(self) -> None:
        """Start copying the counts to the host, after the kernels queued so far."""
        self._sent.copy_(self.state, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def sent_status(self) -> StashStatus:
        """Wait for the last `send_status`, not for work after it, and return the counts."""
        if self._event is not None:
            self._event.synchronize()
        return StashStatus(*self._sent.tolist())

    def stash(self, tensor: torch.Tensor, rows: RowsInUse) -> Stashed:
        """Copy the rows in use of a contiguous tensor to pages.

        If too few pages are free, nothing is stored, the device counts the shortage
        (`StashStatus.num_short`), and a reload returns zeros.

        Args:
            tensor: A tensor of shape [rows.num_rows, ...].
            rows: Its rows in use. A row is no larger than a page.
        """
        values = tensor.detach()
        layout = RowLayout.of(values, self.page_bytes)
        sizes = astuple(layout)
        table, taken = _operators.stash_take(self.state, self.stack, rows.total, sizes)
        _operators.stash_store(self.pages, values, rows.places, table, sizes)
        return Stashed(table, taken, rows, layout, values.shape, values.dtype)

    def reload(self, stashed: Stashed) -> torch.Tensor:
        """Return the tensor in new memory; rows not in use or without room are zero."""
        into = torch.empty(stashed.shape, dtype=stashed.dtype, device=self.pages.device)
        places, layout = stashed.rows.places, astuple(stashed.layout)
        _operators.stash_load(into, self.pages, places, stashed.table, layout)
        return into

    def give_back(self, stashed: Stashed) -> None:
        """Free the pages of a tensor; call this once for each `stash`."""
        _operators.stash_give_back(self.state, self.stack, stashed.table, stashed.taken)


def take(
    state: torch.Tensor, stack: torch.Tensor, num_rows: torch.Tensor, layout: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the pages of some rows; the operator ``stash_take`` without Triton."""
    free, required, peak, short = state.split(1)
    sizes, last = RowLayout(*layout), stack.shape[0] - 1
    num_required = (num_rows + (sizes.rows_per_page - 1)) // sizes.rows_per_page
    fits = num_required <= free
    num_taken = num_required * fits
    number = torch.arange(sizes.max_pages, device=state.device)
    top = stack[(free - 1 - number).clamp(0, last)]
    table = torch.where(number < num_taken, top, torch.full_like(top, last))
    free.sub_(num_taken)
    required.add_(num_required)
    peak.copy_(torch.maximum(peak, required))
    short.add_(~fits)
    return table, torch.cat([num_required, num_taken])


def store(
    pages: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    layout: Sequence[int],
) -> None:
    """Copy rows to their pages; the operator ``stash_store`` without Triton."""
    sizes = RowLayout(*layout)
    data = values.reshape(sizes.num_rows, -1).view(torch.uint8).view(sizes.unit)
    _as_rows(pages, sizes).index_put_(_pages_of(places, table, sizes, pages), data)


def load(
    into: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    layout: Sequence[int],
) -> None:
    """Copy rows back from their pages; the operator ``stash_load`` without Triton."""
    sizes = RowLayout(*layout)
    page, row = _pages_of(places, table, sizes, pages)
    data = _as_rows(pages, sizes)[page, row]
    data.masked_fill_((page == pages.shape[0] - 1).unsqueeze(1), 0)
    into.view(sizes.num_rows, -1).view(torch.uint8).view(sizes.unit).copy_(data)


def give_back(
    state: torch.Tensor, stack: torch.Tensor, table: torch.Tensor, taken: torch.Tensor
) -> None:
    """Free pages; the operator ``stash_give_back`` without Triton."""
    free, required, _, _ = state.split(1)
    num_required, num_taken = taken.split(1)
    number, last = torch.arange(table.shape[0], device=state.device), stack.shape[0] - 1
    # While the CPU recorder captures a backward, the pages of its forward are already free, since
    # it restored external memory after the forward. The clamp keeps writes in the stack.
    stack[torch.where(number < num_taken, free + number, last).clamp(max=last)] = table
    free.add_(num_taken)
    required.sub_(num_required)


def _pages_of(
    places: torch.Tensor, table: torch.Tensor, layout: RowLayout, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's page, the overflow page without one, and its place in the page."""
    place = places.clamp(min=0)
    page = table[place // layout.rows_per_page]
    return torch.where(places < 0, pages.shape[0] - 1, page), place % layout.rows_per_page


def _as_rows(pages: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """View pages as [pages, rows per page, units per row]."""
    unit = layout.unit.itemsize
    units = layout.row_bytes // unit
    return pages.view(layout.unit).as_strided(
        (pages.shape[0], layout.rows_per_page, units), (layout.page_bytes // unit, units, 1)
    )


def _on_device(kernel: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return the operator for a device, without the modes of its caller."""

    @wraps(kernel)
    def run(*args: Any) -> Any:
        chosen = kernel
        if device == "CUDA" and importlib.util.find_spec("triton") is not None:
            module = importlib.import_module("chunkgraph.memory.stash.triton_kernels")
            chosen = getattr(module, kernel.__name__)
        with torch._C.DisableTorchFunction():
            return chosen(*args)

    return run


_KERNELS: dict[str, Callable[..., Any]] = {
    "(Tensor(a!) state, Tensor stack, Tensor num_rows, int[] layout) -> (Tensor, Tensor)": take,
    "(Tensor(a!) pages, Tensor values, Tensor places, Tensor table, int[] layout) -> ()": store,
    "(Tensor(a!) into, Tensor pages, Tensor places, Tensor table, int[] layout) -> ()": load,
    "(Tensor(a!) state, Tensor(b!) stack, Tensor table, Tensor taken) -> ()": give_back,
}
_LIBRARY = library.Library("chunkgraph", "FRAGMENT")
for _schema, _kernel in _KERNELS.items():
    _name = f"stash_{_kernel.__name__}"
    _LIBRARY.define(_name + _schema)
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _on_device(_kernel, _device), _device)

"""The stash's kernels in operators of torch: for any device, CUDA graphs and the recorder.

Each kernel is one operator, which the recorder records and replays like torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import wraps
from typing import Any

import torch
from torch import library

from chunkgraph.memory.stash.arena import Arena
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["ReferenceKernels"]

_operators: Any = torch.ops.chunkgraph


class ReferenceKernels:
    """See `StashKernels`. Spill pages work only if the device is a CPU."""

    reads_host_pages = False
    loads_without_memory = False

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """See `StashKernels.take`."""
        stacks = arena.stack, arena.spill_stack
        return Ticket(*_operators.stash_take(arena.state, *stacks, rows.total, astuple(layout)))

    def store(
        self, arena: Arena, values: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.store`."""
        _operators.stash_store(
            arena.pages, arena.spill, values, rows.places, ticket.table, astuple(layout)
        )

    def load(
        self, arena: Arena, into: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.load`."""
        _operators.stash_load(
            into, arena.pages, arena.spill, rows.places, ticket.table, astuple(layout)
        )

    def give_back(self, arena: Arena, ticket: Ticket) -> None:
        """See `StashKernels.give_back`."""
        _operators.stash_give_back(
            arena.state, arena.stack, arena.spill_stack, ticket.table, ticket.taken
        )


def _take(
    state: torch.Tensor,
    stack: torch.Tensor,
    spill_stack: torch.Tensor | None,
    num_rows: torch.Tensor,
    layout: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    free, free_spill, required, peak, short = state.split(1)
    sizes = RowLayout(*layout)
    num_required = (num_rows + (sizes.rows_per_page - 1)) // sizes.rows_per_page
    fits = num_required <= free + free_spill
    num_taken = num_required * fits
    num_device = torch.minimum(num_taken, free)
    num_host = num_taken - num_device
    number = torch.arange(sizes.max_pages, device=state.device)
    none = torch.full_like(number, _no_page(stack, spill_stack), dtype=torch.int32)
    table = torch.where(number < num_device, _top_pages(stack, free, number), none)
    if spill_stack is not None:
        page = _top_pages(spill_stack, free_spill, number - num_device)
        table = torch.where((number >= num_device) & (number < num_taken), page, table)
    free.sub_(num_device)
    free_spill.sub_(num_host)
    required.add_(num_required)
    peak.copy_(torch.maximum(peak, required))
    short.add_(~fits)
    return table, torch.cat([num_required, num_device, num_host])


def _store(
    pages: torch.Tensor,
    spill: torch.Tensor | None,
    values: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    layout: Sequence[int],
) -> None:
    sizes = RowLayout(*layout)
    data = values.reshape(sizes.num_rows, -1).view(torch.uint8).view(sizes.unit)
    page, row = _pages_of(places, table, sizes, _no_page(pages, spill))
    num_pages = pages.shape[0] - 1
    _as_rows(pages, sizes).index_put_((page.clamp(max=num_pages), row), data)
    if spill is not None:
        _as_rows(spill, sizes).index_put_((_spilled(spill, page - num_pages), row), data)


def _load(
    into: torch.Tensor,
    pages: torch.Tensor,
    spill: torch.Tensor | None,
    places: torch.Tensor,
    table: torch.Tensor,
    layout: Sequence[int],
) -> None:
    sizes, num_pages, no_page = RowLayout(*layout), pages.shape[0] - 1, _no_page(pages, spill)
    page, row = _pages_of(places, table, sizes, no_page)
    data = _as_rows(pages, sizes)[page.clamp(max=num_pages), row]
    if spill is not None:
        spilled = _as_rows(spill, sizes)[_spilled(spill, page - num_pages), row]
        data = torch.where((page < num_pages).unsqueeze(1), data, spilled)
    data.masked_fill_((page == no_page).unsqueeze(1), 0)
    into.view(sizes.num_rows, -1).view(torch.uint8).view(sizes.unit).copy_(data)


def _give_back(
    state: torch.Tensor,
    stack: torch.Tensor,
    spill_stack: torch.Tensor | None,
    table: torch.Tensor,
    taken: torch.Tensor,
) -> None:
    free, free_spill, required, _, _ = state.split(1)
    num_required, num_device, num_host = taken.split(1)
    number = torch.arange(table.shape[0], device=state.device)
    _push(stack, free, number, num_device, table)
    if spill_stack is not None:
        _push(spill_stack, free_spill, number - num_device, num_host, table)
    free.add_(num_device)
    free_spill.add_(num_host)
    required.sub_(num_required)


def _no_page(pages: torch.Tensor, spilled: torch.Tensor | None) -> int:
    """Return `Arena.no_page`, from the pages or their stacks: each has one row more."""
    return pages.shape[0] - 1 + (0 if spilled is None else spilled.shape[0] - 1)


def _top_pages(stack: torch.Tensor, free: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the pages ``number`` from the top of the stack; any value beyond the stack."""
    return stack[(free - 1 - number).clamp(0, stack.shape[0] - 1)]


def _push(
    stack: torch.Tensor,
    free: torch.Tensor,
    number: torch.Tensor,
    count: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Push those entries of ``table`` on the stack whose ``number`` lies in ``[0, count)``.

    While the CPU recorder captures a backward, the pages of its forward are already free, since
    the recorder restored external memory after the forward. The clamp keeps writes in the stack.
    """
    is_pushed = (number >= 0) & (number < count)
    last = stack.shape[0] - 1
    stack[torch.where(is_pushed, free + number, last).clamp(max=last)] = table


def _pages_of(
    places: torch.Tensor, table: torch.Tensor, layout: RowLayout, no_page: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's page, or ``no_page``, and its place in the page."""
    place = places.clamp(min=0)
    page = table[place // layout.rows_per_page]
    return torch.where(places < 0, no_page, page), place % layout.rows_per_page


def _spilled(spill: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the index among the spill pages; for other pages the last one, which is unused."""
    return torch.where(number >= 0, number, spill.shape[0] - 1)


def _as_rows(pages: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """View pages as [pages, rows per page, units per row]."""
    unit = layout.unit.itemsize
    units = layout.row_bytes // unit
    return pages.view(layout.unit).as_strided(
        (pages.shape[0], layout.rows_per_page, units), (layout.page_bytes // unit, units, 1)
    )


def _plain(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``kernel`` without the modes of its caller, which see one operator."""

    @wraps(kernel)
    def run(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return kernel(*args)

    return run


_SCHEMAS: dict[str, Callable[..., Any]] = {
    "stash_take(Tensor(a!) state, Tensor stack, Tensor? spill_stack, Tensor num_rows, "
    "int[] layout) -> (Tensor, Tensor)": _take,
    "stash_store(Tensor(a!) pages, Tensor(b!)? spill, Tensor values, Tensor places, Tensor table, "
    "int[] layout) -> ()": _store,
    "stash_load(Tensor(a!) into, Tensor pages, Tensor? spill, Tensor places, Tensor table, "
    "int[] layout) -> ()": _load,
    "stash_give_back(Tensor(a!) state, Tensor(b!) stack, Tensor(c!)? spill_stack, Tensor table, "
    "Tensor taken) -> ()": _give_back,
}
_LIBRARY = library.Library("chunkgraph", "FRAGMENT")
for _schema, _kernel in _SCHEMAS.items():
    _LIBRARY.define(_schema)
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_schema.partition("(")[0], _plain(_kernel), _device)

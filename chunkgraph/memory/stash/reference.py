"""The stash's kernels in plain torch operators: for any device, CUDA graphs and the recorder."""

from __future__ import annotations

import torch

from chunkgraph.memory.stash.arena import Arena
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["ReferenceKernels"]


class ReferenceKernels:
    """See `StashKernels`. Spill pages work only if the device is a CPU."""

    reads_host_pages = False
    loads_without_memory = False

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """See `StashKernels.take`."""
        num_required = (rows.total + (layout.rows_per_page - 1)) // layout.rows_per_page
        fits = num_required <= arena.free + arena.free_spill
        num_taken = num_required * fits
        num_device = torch.minimum(num_taken, arena.free)
        num_host = num_taken - num_device
        number = torch.arange(layout.max_pages, device=arena.device)
        none = torch.full_like(number, arena.no_page, dtype=torch.int32)
        table = torch.where(number < num_device, _top_pages(arena.stack, arena.free, number), none)
        if arena.spill_stack is not None:
            page = _top_pages(arena.spill_stack, arena.free_spill, number - num_device)
            table = torch.where((number >= num_device) & (number < num_taken), page, table)
        arena.free.sub_(num_device)
        arena.free_spill.sub_(num_host)
        arena.required.add_(num_required)
        arena.peak.copy_(torch.maximum(arena.peak, arena.required))
        arena.short.add_(~fits)
        return Ticket(table, torch.cat([num_required, num_device, num_host]))

    def store(
        self, arena: Arena, values: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.store`."""
        data = values.reshape(layout.num_rows, -1).view(torch.uint8).view(layout.unit)
        page, row = _pages_of(arena, rows, layout, ticket)
        here = page.clamp(max=arena.size.num_pages)
        _as_rows(arena.pages, layout).index_put_((here, row), data)
        if arena.spill is not None:
            there = _spilled(arena, page)
            _as_rows(arena.spill, layout).index_put_((there, row), data)

    def load(
        self, arena: Arena, into: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.load`."""
        page, row = _pages_of(arena, rows, layout, ticket)
        data = _as_rows(arena.pages, layout)[page.clamp(max=arena.size.num_pages), row]
        if arena.spill is not None:
            spilled = _as_rows(arena.spill, layout)[_spilled(arena, page), row]
            data = torch.where((page < arena.size.num_pages).unsqueeze(1), data, spilled)
        data.masked_fill_((page == arena.no_page).unsqueeze(1), 0)
        into.view(layout.num_rows, -1).view(torch.uint8).view(layout.unit).copy_(data)

    def give_back(self, arena: Arena, layout: RowLayout, ticket: Ticket) -> None:
        """See `StashKernels.give_back`."""
        num_required, num_device, num_host = ticket.taken.split(1)
        number = torch.arange(layout.max_pages, device=arena.device)
        _push(arena.stack, arena.free, number, num_device, ticket.table)
        if arena.spill_stack is not None:
            _push(arena.spill_stack, arena.free_spill, number - num_device, num_host, ticket.table)
        arena.free.add_(num_device)
        arena.free_spill.add_(num_host)
        arena.required.sub_(num_required)


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
    arena: Arena, rows: RowsInUse, layout: RowLayout, ticket: Ticket
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's page, or ``no_page``, and its place in the page."""
    place = rows.places.clamp(min=0)
    page = ticket.table[place // layout.rows_per_page]
    return torch.where(rows.places < 0, arena.no_page, page), place % layout.rows_per_page


def _spilled(arena: Arena, page: torch.Tensor) -> torch.Tensor:
    """Return the index among the spill pages; for other pages the last one, which is unused."""
    last = arena.size.num_spill_pages
    number = page - arena.size.num_pages
    return torch.where(number >= 0, number, last)


def _as_rows(pages: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """View pages as [pages, rows per page, units per row]."""
    unit = layout.unit.itemsize
    units = layout.row_bytes // unit
    return pages.view(layout.unit).as_strided(
        (pages.shape[0], layout.rows_per_page, units), (layout.page_bytes // unit, units, 1)
    )

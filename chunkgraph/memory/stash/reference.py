"""The stash in plain torch operators: on any device, in a CUDA graph and on the CPU recorder."""

from __future__ import annotations

import torch

from chunkgraph.memory.stash.arena import Arena
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["ReferenceKernels"]


class ReferenceKernels:
    """See `StashKernels`. Spill pages only where the host is the device."""

    reads_host_pages = False
    loads_without_memory = False

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """See `StashKernels.take`."""
        wanted = (rows.total + (layout.rows_per_page - 1)) // layout.rows_per_page
        fits = wanted <= arena.free + arena.free_spill
        got = wanted * fits
        got_here = torch.minimum(got, arena.free)
        got_there = got - got_here
        number = torch.arange(layout.max_pages, device=arena.device)
        none = torch.full_like(number, arena.no_page, dtype=torch.int32)
        table = torch.where(number < got_here, _popped(arena.stack, arena.free, number), none)
        if arena.spill_stack is not None:
            page = _popped(arena.spill_stack, arena.free_spill, number - got_here)
            table = torch.where((number >= got_here) & (number < got), page, table)
        arena.free.sub_(got_here)
        arena.free_spill.sub_(got_there)
        arena.wanted.add_(wanted)
        arena.peak.copy_(torch.maximum(arena.peak, arena.wanted))
        arena.short.add_(~fits)
        return Ticket(table, torch.cat([wanted, got_here, got_there]))

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
        found = _as_rows(arena.pages, layout)[page.clamp(max=arena.size.num_pages), row]
        if arena.spill is not None:
            there = _as_rows(arena.spill, layout)[_spilled(arena, page), row]
            found = torch.where((page < arena.size.num_pages).unsqueeze(1), found, there)
        found.masked_fill_((page == arena.no_page).unsqueeze(1), 0)
        into.view(layout.num_rows, -1).view(torch.uint8).view(layout.unit).copy_(found)

    def give_back(self, arena: Arena, layout: RowLayout, ticket: Ticket) -> None:
        """See `StashKernels.give_back`."""
        wanted, got_here, got_there = ticket.taken.split(1)
        number = torch.arange(layout.max_pages, device=arena.device)
        _push(arena.stack, arena.free, number, got_here, ticket.table)
        if arena.spill_stack is not None:
            _push(arena.spill_stack, arena.free_spill, number - got_here, got_there, ticket.table)
        arena.free.add_(got_here)
        arena.free_spill.add_(got_there)
        arena.wanted.sub_(wanted)


def _popped(stack: torch.Tensor, free: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The page that taker ``number`` gets; anything where there is none."""
    return stack[(free - 1 - number).clamp(0, stack.shape[0] - 1)]


def _push(
    stack: torch.Tensor,
    free: torch.Tensor,
    number: torch.Tensor,
    count: torch.Tensor,
    table: torch.Tensor,
) -> None:
    """Put those entries of ``table`` on the stack whose ``number`` lies in ``[0, count)``.

    While the CPU recorder captures a backward, the pages that its forward took are free already:
    it gave external memory its old contents back. Nothing may be written behind the stack then.
    """
    is_given = (number >= 0) & (number < count)
    last = stack.shape[0] - 1
    stack[torch.where(is_given, free + number, last).clamp(max=last)] = table


def _pages_of(
    arena: Arena, rows: RowsInUse, layout: RowLayout, ticket: Ticket
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row its page, or no page, and its place in the page."""
    place = rows.places.clamp(min=0)
    page = ticket.table[place // layout.rows_per_page]
    return torch.where(rows.places < 0, arena.no_page, page), place % layout.rows_per_page


def _spilled(arena: Arena, page: torch.Tensor) -> torch.Tensor:
    """The number among the spill pages; the last, which nobody reads, for all others."""
    last = arena.size.num_spill_pages
    number = page - arena.size.num_pages
    return torch.where(number >= 0, number, last)


def _as_rows(pages: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Pages as [pages, rows in a page, units in a row]."""
    unit = layout.unit.itemsize
    units = layout.row_bytes // unit
    return pages.view(layout.unit).as_strided(
        (pages.shape[0], layout.rows_per_page, units), (layout.page_bytes // unit, units, 1)
    )

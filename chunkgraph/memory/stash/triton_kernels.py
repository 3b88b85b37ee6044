"""The stash's kernels in Triton; imported only if Triton is installed.

One program allocates or frees pages; one program per row copies. No two kernels run at the same
time, since all are launched on one stream. Kernels take pointers and sizes as separate arguments,
as Triton requires.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chunkgraph.memory.stash.arena import Arena
from chunkgraph.memory.stash.rows import RowLayout, RowsInUse
from chunkgraph.memory.stash.ticket import Ticket

__all__ = ["TritonKernels"]

_TABLE_BLOCK = 256
_MAX_ROW_BLOCK = 1024


@triton.jit
def _take(  # type: ignore[no-untyped-def]  # many parameters: a kernel takes no structures
    total,
    state,
    stack,
    spill_stack,
    table,
    taken,
    rows_per_page,
    max_pages,
    no_page,
    HAS_SPILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    num_required = (tl.load(total) + rows_per_page - 1) // rows_per_page
    free = tl.load(state)
    free_spill = tl.load(state + 1)
    in_use = tl.load(state + 2) + num_required
    peak = tl.load(state + 3)
    short = tl.load(state + 4)
    fits = num_required <= free + free_spill
    got = tl.where(fits, num_required, 0)
    here = tl.minimum(got, free)
    for start in range(0, max_pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(stack + free - 1 - i, mask=i < here, other=no_page)
        if HAS_SPILL:
            is_spilled = (i >= here) & (i < got)
            spilled = tl.load(
                spill_stack + free_spill - 1 - (i - here), mask=is_spilled, other=no_page
            )
            page = tl.where(is_spilled, spilled, page)
        tl.store(table + i, page, mask=i < max_pages)
    tl.debug_barrier()  # all warps have read the state
    tl.store(state, free - here)
    tl.store(state + 1, free_spill - (got - here))
    tl.store(state + 2, in_use)
    tl.store(state + 3, tl.maximum(peak, in_use))
    tl.store(state + 4, tl.where(fits, short, short + 1))
    tl.store(taken, num_required)
    tl.store(taken + 1, here)
    tl.store(taken + 2, got - here)


@triton.jit
def _give_back(  # type: ignore[no-untyped-def]
    state, stack, spill_stack, table, taken, max_pages, HAS_SPILL: tl.constexpr, BLOCK: tl.constexpr
):
    num_required = tl.load(taken)
    here = tl.load(taken + 1)
    got = here + tl.load(taken + 2)
    free = tl.load(state)
    free_spill = tl.load(state + 1)
    in_use = tl.load(state + 2)
    for start in range(0, max_pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(table + i, mask=i < got, other=0)
        tl.store(stack + free + i, page, mask=i < here)
        if HAS_SPILL:
            is_spilled = (i >= here) & (i < got)
            tl.store(spill_stack + free_spill + (i - here), page, mask=is_spilled)
    tl.debug_barrier()
    tl.store(state, free + here)
    tl.store(state + 1, free_spill + (got - here))
    tl.store(state + 2, in_use - num_required)


@triton.jit
def _copy_row(  # type: ignore[no-untyped-def]  # many parameters: see `_take`
    data,
    pages,
    spill,
    places,
    table,
    rows_per_page,
    units,
    page_units,
    num_pages,
    no_page,
    LOADS: tl.constexpr,
    HAS_SPILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    page = tl.load(table + place // rows_per_page, mask=place >= 0, other=no_page).to(tl.int64)
    at = (place % rows_per_page) * units
    # Lengths rather than booleans, so that the masks below compare a block with one number.
    units_of_row = tl.where(page < no_page, units, 0)
    units_here = tl.where(page < num_pages, units, 0)
    units_there = units_of_row - units_here
    for start in range(0, units, BLOCK):
        i = start + tl.arange(0, BLOCK)
        cells = data + row * units + i
        here = pages + page * page_units + at + i
        there = spill + (page - num_pages) * page_units + at + i
        if LOADS:
            value = tl.load(here, mask=i < units_here, other=0)
            if HAS_SPILL:
                value += tl.load(there, mask=i < units_there, other=0)
            tl.store(cells, value, mask=i < units)
        else:
            value = tl.load(cells, mask=i < units_of_row, other=0)
            tl.store(here, value, mask=i < units_here)
            if HAS_SPILL:
                tl.store(there, value, mask=i < units_there)


class TritonKernels:
    """See `StashKernels`. Spill pages are read and written in place, in pinned memory."""

    reads_host_pages = True
    loads_without_memory = True

    def take(self, arena: Arena, rows: RowsInUse, layout: RowLayout) -> Ticket:
        """See `StashKernels.take`."""
        table = torch.empty(layout.max_pages, dtype=torch.int32, device=arena.device)
        taken = torch.empty(3, dtype=torch.int64, device=arena.device)
        _take[(1,)](
            rows.total,
            arena.state,
            arena.stack,
            arena.stack if arena.spill_stack is None else arena.spill_stack,
            table,
            taken,
            layout.rows_per_page,
            layout.max_pages,
            arena.no_page,
            HAS_SPILL=arena.spill is not None,
            BLOCK=_TABLE_BLOCK,
        )
        return Ticket(table, taken)

    def store(
        self, arena: Arena, values: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.store`."""
        _copy(arena, values, rows, layout, ticket, loads=False)

    def load(
        self, arena: Arena, into: torch.Tensor, rows: RowsInUse, layout: RowLayout, ticket: Ticket
    ) -> None:
        """See `StashKernels.load`."""
        _copy(arena, into, rows, layout, ticket, loads=True)

    def give_back(self, arena: Arena, ticket: Ticket) -> None:
        """See `StashKernels.give_back`."""
        _give_back[(1,)](
            arena.state,
            arena.stack,
            arena.stack if arena.spill_stack is None else arena.spill_stack,
            ticket.table,
            ticket.taken,
            ticket.table.shape[0],
            HAS_SPILL=arena.spill is not None,
            BLOCK=_TABLE_BLOCK,
        )


def _copy(
    arena: Arena,
    data: torch.Tensor,
    rows: RowsInUse,
    layout: RowLayout,
    ticket: Ticket,
    *,
    loads: bool,
) -> None:
    unit = layout.unit
    units = layout.row_bytes // unit.itemsize
    pages = arena.pages.view(unit)
    _copy_row[(layout.num_rows,)](
        data.view(layout.num_rows, -1).view(torch.uint8).view(unit),
        pages,
        pages if arena.spill is None else arena.spill.view(unit),
        rows.places,
        ticket.table,
        layout.rows_per_page,
        units,
        layout.page_bytes // unit.itemsize,
        arena.size.num_pages,
        arena.no_page,
        LOADS=loads,
        HAS_SPILL=arena.spill is not None,
        BLOCK=min(_MAX_ROW_BLOCK, triton.next_power_of_2(units)),
    )

"""The stash's kernels in Triton; imported only if Triton is installed.

One program allocates or frees pages; one program per row copies. No two kernels run at the same
time, since all are launched on one stream. Kernels take pointers and sizes as separate arguments,
as Triton requires.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from chunkgraph.memory.stash.rows import RowLayout

_TABLE_BLOCK = 1024
_MAX_ROW_BLOCK = 1024


@triton.jit
def _take(  # type: ignore[no-untyped-def]  # many parameters: a kernel takes no structures
    total, state, stack, table, taken, rows_per_page, max_pages, num_pages, BLOCK: tl.constexpr
):
    num_required = (tl.load(total) + rows_per_page - 1) // rows_per_page
    free = tl.load(state)
    in_use = tl.load(state + 1) + num_required
    peak = tl.load(state + 2)
    short = tl.load(state + 3)
    fits = num_required <= free
    num_taken = tl.where(fits, num_required, 0)
    for start in range(0, max_pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(stack + free - 1 - i, mask=i < num_taken, other=num_pages)
        tl.store(table + i, page, mask=i < max_pages)
    tl.debug_barrier()  # all warps have read the state
    tl.store(state, free - num_taken)
    tl.store(state + 1, in_use)
    tl.store(state + 2, tl.maximum(peak, in_use))
    tl.store(state + 3, tl.where(fits, short, short + 1))
    tl.store(taken, num_required)
    tl.store(taken + 1, num_taken)


@triton.jit
def _give_back(  # type: ignore[no-untyped-def]
    state, stack, table, taken, max_pages, BLOCK: tl.constexpr
):
    num_required = tl.load(taken)
    num_taken = tl.load(taken + 1)
    free = tl.load(state)
    in_use = tl.load(state + 1)
    for start in range(0, max_pages, BLOCK):
        i = start + tl.arange(0, BLOCK)
        page = tl.load(table + i, mask=i < num_taken, other=0)
        tl.store(stack + free + i, page, mask=i < num_taken)
    tl.debug_barrier()
    tl.store(state, free + num_taken)
    tl.store(state + 1, in_use - num_required)


@triton.jit
def _copy_row(  # type: ignore[no-untyped-def]  # many parameters: see `_take`
    data,
    pages,
    places,
    table,
    rows_per_page,
    units,
    page_units,
    num_pages,
    LOADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    page = tl.load(table + place // rows_per_page, mask=place >= 0, other=num_pages).to(tl.int64)
    at = page * page_units + (place % rows_per_page) * units
    # A length rather than a boolean, so that the masks below compare a block with one number.
    stored_units = tl.where(page < num_pages, units, 0)
    for start in range(0, units, BLOCK):
        i = start + tl.arange(0, BLOCK)
        cells = data + row * units + i
        if LOADS:
            tl.store(cells, tl.load(pages + at + i, mask=i < stored_units, other=0), mask=i < units)
        else:
            tl.store(pages + at + i, tl.load(cells, mask=i < stored_units), mask=i < stored_units)


def take(
    state: torch.Tensor, stack: torch.Tensor, num_rows: torch.Tensor, layout: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `paged_stash.take`."""
    sizes = RowLayout(*layout)
    table = torch.empty(sizes.max_pages, dtype=torch.int32, device=state.device)
    taken = torch.empty(2, dtype=torch.int64, device=state.device)
    _take[(1,)](
        num_rows,
        state,
        stack,
        table,
        taken,
        sizes.rows_per_page,
        sizes.max_pages,
        stack.shape[0] - 1,
        BLOCK=_TABLE_BLOCK,
    )
    return table, taken


def store(pages: torch.Tensor, values: torch.Tensor, *rest: Any) -> None:
    """See `paged_stash.store`."""
    _copy(values, pages, *rest, loads=False)


def load(into: torch.Tensor, *rest: Any) -> None:
    """See `paged_stash.load`."""
    _copy(into, *rest, loads=True)


def give_back(
    state: torch.Tensor, stack: torch.Tensor, table: torch.Tensor, taken: torch.Tensor
) -> None:
    """See `paged_stash.give_back`."""
    _give_back[(1,)](state, stack, table, taken, table.shape[0], BLOCK=_TABLE_BLOCK)


def _copy(
    data: torch.Tensor,
    pages: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    layout: Sequence[int],
    *,
    loads: bool,
) -> None:
    sizes = RowLayout(*layout)
    unit, units = sizes.unit, sizes.row_bytes // sizes.unit.itemsize
    _copy_row[(sizes.num_rows,)](
        data.view(sizes.num_rows, -1).view(torch.uint8).view(unit),
        pages.view(unit),
        places,
        table,
        sizes.rows_per_page,
        units,
        sizes.page_bytes // unit.itemsize,
        pages.shape[0] - 1,
        LOADS=loads,
        BLOCK=min(_MAX_ROW_BLOCK, triton.next_power_of_2(units)),
    )

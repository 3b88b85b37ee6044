"""Plan each rank of a request, and print the plans as tables or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from chunkgraph.cli.plan_export import Grid
from chunkgraph.cli.plan_memory import MEMORY_HEADINGS, fit_lines, kept_line, memory_cells
from chunkgraph.cli.plan_request import Request
from chunkgraph.schedules import get_family
from chunkgraph.slots import MemoryEstimate, SlotPlan, estimate_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["RankRow", "as_json", "exit_code", "print_rows", "rows_of", "table"]

_MAX_RANKS = 256
"""Maximum number of printed ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """The plan of one rank."""

    plan: SlotPlan
    bubble_ratio: float
    memory: MemoryEstimate | None


def rows_of(request: Request, ranks: Sequence[int], grid: Grid | None = None) -> list[RankRow]:
    """Plan the ranks; take the bubble ratio from the grid, if there is one.

    Raises:
        TopologyError: The sizes do not form a pipeline.
    """
    if grid is None and request.file is not None:
        grid = Grid.of(request.file, ranks)  # a file has no closed form
    shape, model = request.shape(), request.model
    rows = []
    for rank in ranks:
        plan = request.plan(rank)
        ratio = (
            get_family(request.schedule).bubble_ratio(shape)
            if grid is None
            else grid.simulation.bubble_ratio(rank)
        )
        memory = None if model is None else estimate_memory(plan, model)
        rows.append(RankRow(plan=plan, bubble_ratio=ratio, memory=memory))
    return rows


def as_json(row: RankRow) -> dict[str, object]:
    """Return the plan of one rank for ``--json``."""
    plan = row.plan
    return {
        "rank": plan.rank,
        "slots_per_chunk": plan.slots_per_chunk,
        "num_graphs": plan.num_graphs,
        "peak_in_flight": plan.peak_in_flight,
        "bubble_ratio": round(row.bubble_ratio, 6),
        **({} if row.memory is None else asdict(row.memory)),
    }


def print_rows(console: Console, request: Request, rows: Sequence[RankRow]) -> None:
    """Print slots and memory, and whether they fit on the GPU."""
    if request.file is not None:
        holds = f"steps of {request.num_microbatches} microbatches"
    elif request.is_bounded:
        holds = "any legal number of microbatches"
    else:
        holds = f"up to {request.num_microbatches} microbatches"
    console.print(f"{request.schedule}: slots for {holds}", style="bold", soft_wrap=True)
    shown = rows[:_MAX_RANKS]
    planned = [
        [
            str(row.plan.rank),
            " ".join(map(str, row.plan.slots_per_chunk)),
            str(row.plan.num_graphs),
            str(row.plan.peak_in_flight),
            f"{row.bubble_ratio:.1%}",
        ]
        for row in shown
    ]
    headings = ("Rank", "Slots per chunk", "Graphs", "Peak in flight", "Bubble ratio")
    console.print(table(headings, planned))
    estimates = [(row.plan, row.memory) for row in rows if row.memory is not None]
    if estimates:
        console.print("Memory, estimated from the model's sizes", style="bold")
        cells = [memory_cells(*one) for one in estimates[:_MAX_RANKS]]
        console.print(table(MEMORY_HEADINGS, cells))
        console.print(kept_line(estimates))
    if len(rows) > len(shown):
        rest = len(rows) - len(shown)
        console.print(f"... {rest} more ranks: --json prints all, --rank R one of them")
    for note in (*request.omissions, *request.notes):
        console.print(note, soft_wrap=True, markup=False)
    if request.gpu_bytes is not None and request.model is not None:
        first, *others = fit_lines(
            estimates,
            request.model,
            request.gpu_bytes,
            is_complete=not request.omissions,
        )
        style = "bold red" if exit_code(request, rows) else "bold green"
        console.print(first, style=style, soft_wrap=True)
        for line in others:
            console.print(line, soft_wrap=True)


def exit_code(request: Request, rows: Sequence[RankRow]) -> int:
    """Return 1 if a rank does not fit on the GPU, otherwise 0."""
    most = max((row.memory.total_bytes for row in rows if row.memory is not None), default=0)
    return int(request.gpu_bytes is not None and most > request.gpu_bytes)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table with right-aligned columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        # What has no blanks must not be cut.
        table.add_column(heading, justify="right", no_wrap=" " not in heading)
    for row in rows:
        table.add_row(*row)
    return table

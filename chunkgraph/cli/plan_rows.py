"""Plan each rank of a request, and print the plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chunkgraph._text import shorten
from chunkgraph.cli.plan_grid import Grid
from chunkgraph.cli.plan_memory import fit_lines, fits
from chunkgraph.cli.plan_request import Request
from chunkgraph.cli.plan_tables import RankRow, print_tables
from chunkgraph.schedules import PipelineShape, check_step, get_family
from chunkgraph.slots import (
    SlotPlan,
    estimate_banks,
    estimate_memory,
    plan_schedule,
    plan_slots,
)

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["exit_code", "plan_of", "print_rows", "rows_of", "shape_of"]


def shape_of(request: Request) -> PipelineShape:
    """Return the shape of the step.

    Raises:
        TopologyError: The sizes do not form a pipeline.
    """
    if request.file is not None:
        return PipelineShape(
            num_ranks=request.num_ranks,
            num_microbatches=request.num_microbatches,
            num_chunks=request.num_chunks,
        )
    return check_step(
        request.schedule,
        num_ranks=request.num_ranks,
        num_microbatches=request.num_microbatches,
        num_chunks=request.num_chunks,
        group_size=request.group_size,
    )


def plan_of(request: Request, rank: int) -> SlotPlan:
    """Plan the slots of a rank."""
    if request.file is not None:
        return plan_schedule(request.file, rank)
    is_bounded = get_family(request.schedule).is_bounded
    return plan_slots(
        request.num_ranks,
        request.num_chunks,
        request.group_size,
        rank=rank,
        schedule=request.schedule,
        max_num_microbatches=None if is_bounded else request.num_microbatches,
    )


def rows_of(
    request: Request, shape: PipelineShape, ranks: Sequence[int], grid: Grid | None = None
) -> list[RankRow]:
    """Plan the ranks; take the bubble ratio from the grid, if there is one."""
    if grid is None and request.file is not None:
        grid = Grid.of(request.file, ranks, None)  # a file has no closed form
    return [_row(request, shape, rank, grid) for rank in ranks]


def print_rows(console: Console, request: Request, rows: Sequence[RankRow]) -> None:
    """Print slots and memory, and whether they fit on the GPU."""
    if request.file is not None:
        holds = f"steps of {request.num_microbatches} microbatches"
    elif get_family(request.schedule).is_bounded:
        holds = "any legal number of microbatches"
    else:
        holds = f"up to {request.num_microbatches} microbatches"
    console.print(f"{request.schedule}: slots for {holds}", style="bold", soft_wrap=True)
    print_tables(console, rows)
    if request.seq_counts:
        numbers = ", ".join(map(str, request.seq_counts))
        times = f"{len(request.seq_counts)} times as many graphs, in the same memory"
        console.print(f"For {shorten(numbers)} packed sequences: {times}", soft_wrap=True)
    for note in request.notes:
        console.print(note, soft_wrap=True, markup=False)
    estimates = [(row.plan, row.memory) for row in rows if row.memory is not None]
    if request.gpu_bytes is not None and request.model is not None and estimates:
        style = "bold green" if fits(estimates, request.gpu_bytes) else "bold red"
        shared = request.shared_slots
        first, *others = fit_lines(estimates, request.model, request.gpu_bytes, shared_slots=shared)
        console.print(first, style=style, soft_wrap=True)
        for line in others:
            console.print(line, soft_wrap=True)


def exit_code(request: Request, rows: Sequence[RankRow]) -> int:
    """Return 1 if a rank does not fit on the GPU, otherwise 0."""
    estimates = [(row.plan, row.memory) for row in rows if row.memory is not None]
    return int(request.gpu_bytes is not None and not fits(estimates, request.gpu_bytes))


def _row(request: Request, shape: PipelineShape, rank: int, grid: Grid | None) -> RankRow:
    plan, model = plan_of(request, rank), request.model
    return RankRow(
        plan=plan,
        # Without costs, a grid would give the same ratio.
        bubble_ratio=get_family(request.schedule).bubble_ratio(shape)
        if grid is None
        else grid.simulation.bubble_ratio(rank),
        step_ms=None if grid is None or request.costs is None else grid.simulation.makespan_ms,
        memory=None
        if model is None
        else estimate_memory(plan, model, shared_slots=request.shared_slots),
        banks=estimate_banks(plan, model, request.banks)
        if model is not None and request.banks
        else (),
    )

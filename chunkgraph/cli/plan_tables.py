"""Plan each rank of a request, and compare schedules; print both as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._text import counted, format_bytes, shorten
from chunkgraph.cli.plan_export import Grid
from chunkgraph.cli.plan_request import Request
from chunkgraph.errors import TopologyError
from chunkgraph.schedules import get_family, list_schedules
from chunkgraph.slots import MemoryEstimate, SlotPlan, estimate_memory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BASE = "1f1b"
_TOLERANCE = 1.01
# A backward takes two forwards.
_FORWARDS_PER_MICROBATCH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """The plan of one rank."""

    plan: SlotPlan
    bubble_ratio: float
    memory: MemoryEstimate | None


def rows_of(request: Request, grid: Grid | None = None) -> list[RankRow]:
    """Plan all ranks; take the bubble ratio from the grid, if there is one.

    Raises:
        TopologyError: The sizes do not form a pipeline.
    """
    if grid is None and request.file is not None:
        grid = Grid.of(request.file)  # a file has no closed form
    shape, model = request.shape(), request.model
    rows = []
    for rank in range(request.num_ranks):
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
        holds = f"steps of {counted(request.num_microbatches, 'microbatch')}"
    elif request.is_bounded:
        holds = "any legal number of microbatches"
    else:
        holds = f"up to {counted(request.num_microbatches, 'microbatch')}"
    heading = f"{shorten(request.schedule)}: slots for {holds}"
    console.print(heading, style="bold", soft_wrap=True)
    planned = [
        [
            str(row.plan.rank),
            " ".join(map(str, row.plan.slots_per_chunk)),
            str(row.plan.num_graphs),
            str(row.plan.peak_in_flight),
            f"{row.bubble_ratio:.1%}",
        ]
        for row in rows
    ]
    columns = ("Rank", "Slots per chunk", "Graphs", "Peak in flight", "Bubble ratio")
    console.print(table(columns, planned))
    estimates = [(row.plan, row.memory) for row in rows if row.memory is not None]
    if estimates:
        _print_memory(console, estimates)
    for note in (*request.omissions, *request.notes):
        console.print(note, soft_wrap=True)
    if request.gpu_bytes is not None and estimates:
        plan, memory = max(estimates, key=lambda one: one[1].total_bytes)
        size, total = format_bytes(request.gpu_bytes), format_bytes(memory.total_bytes)
        need = f"in {size}: rank {plan.rank} needs {total}."
        if exit_code(request, rows):
            line = (
                f"Does not fit {need} Recompute activations (recompute_granularity), shard the "
                "optimizer (use_distributed_optimizer), or use smaller microbatches or more ranks."
            )
        else:
            verdict = "May fit" if request.omissions else "Fits"
            left = format_bytes(request.gpu_bytes - memory.total_bytes)
            line = (
                f"{verdict} {need} {left} are left for CUDA, NCCL, workspaces and fragmentation, "
                "which are not estimated."
            )
        style = "bold red" if exit_code(request, rows) else "bold green"
        console.print(line, style=style, soft_wrap=True)


def _print_memory(console: Console, estimates: Sequence[tuple[SlotPlan, MemoryEstimate]]) -> None:
    """Print the memory of each rank, and what graphs keep of it between steps."""
    console.print("Memory, estimated from the model's sizes", style="bold")
    headings = ("Rank", "Weights", "Gradients", "Optimizer", "Slots", "Scratch", "Sum")
    cells = []
    for plan, memory in estimates:
        sizes = (
            memory.parameter_bytes,
            memory.gradient_bytes,
            memory.optimizer_bytes,
            memory.slot_bytes,
            memory.scratch_bytes + memory.logit_bytes,
            memory.total_bytes,
        )
        cells.append([str(plan.rank), *map(format_bytes, sizes)])
    console.print(table(headings, cells))
    plan, memory = max(estimates, key=lambda one: one[1].slot_bytes)
    one_slot = memory.slot_bytes_per_chunk[0]
    kept = format_bytes(memory.slot_bytes + memory.scratch_bytes)
    eager = format_bytes(plan.peak_in_flight * one_slot)
    console.print(
        f"One slot: {format_bytes(one_slot)}. Graphs keep {kept} of slots and scratch between "
        f"steps (rank {plan.rank}); eager training has {eager} of activations at its peak."
    )


def exit_code(request: Request, rows: Sequence[RankRow]) -> int:
    """Return 1 if a rank does not fit on the GPU, otherwise 0."""
    return int(request.gpu_bytes is not None and _largest_bytes(rows) > request.gpu_bytes)


def _largest_bytes(rows: Sequence[RankRow]) -> int:
    """Return the memory of the rank that needs the most; 0 without a model."""
    return max((row.memory.total_bytes for row in rows if row.memory is not None), default=0)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One schedule of a comparison.

    Attributes:
        request: The request for this schedule alone.
        bubble_ratio: Idle share of the rank that idles most.
        step: Time of the step, in forwards of all layers of a rank.
        slots: What those of the fullest rank hold, in microbatches of all its layers.
        memory_bytes: Estimate for the rank that needs the most; 0 without a model.
    """

    request: Request
    bubble_ratio: float
    step: float
    slots: float
    memory_bytes: int


def compare(request: Request) -> tuple[list[Compared], list[str]]:
    """Plan a step of every schedule by name, and of the request's own file.

    Returns:
        The schedules, and the reasons why others cannot run.

    Raises:
        TopologyError: Not even 1F1B can run.
    """
    requests = [
        replace(
            request,
            schedule=name,
            num_chunks=get_family(name).num_chunks or max(2, request.num_chunks),
            file=None,
        )
        for name in list_schedules()
    ]
    if request.file is not None:
        requests.append(request)
    compared, refused = [], []
    for own in requests:
        try:
            rows = rows_of(own)
        except TopologyError as error:
            if own.schedule == _BASE:
                raise
            refused.append(str(error))
            continue
        bubble_ratio = max(row.bubble_ratio for row in rows)
        one = Compared(
            request=own,
            bubble_ratio=bubble_ratio,
            step=_FORWARDS_PER_MICROBATCH * own.num_microbatches / (1 - bubble_ratio),
            slots=max(row.plan.num_slots for row in rows) / own.num_chunks,
            memory_bytes=_largest_bytes(rows),
        )
        compared.append(one)
    return compared, refused


def print_comparison(
    console: Console, compared: Sequence[Compared], refused: Sequence[str]
) -> Request:
    """Print the table and the recommendation, which is returned."""
    base = next(one for one in compared if one.request.schedule == _BASE)
    headings = ["Schedule", "Chunks", "Bubble", "Step, F", "Of 1f1b", "Slots", "Memory"]
    cells = [
        [
            shorten(Path(one.request.schedule).name) + " *"[one.request.runs_in_megatron],
            str(one.request.num_chunks),
            f"{one.bubble_ratio:.1%}",
            f"{one.step:.1f}",
            f"{one.step / base.step:.3f}",
            f"{one.slots:g}",
            format_bytes(one.memory_bytes),
        ]
        for one in compared
    ]
    num_columns = len(headings) if base.memory_bytes else len(headings) - 1
    console.print(table(headings[:num_columns], [line[:num_columns] for line in cells]))
    for omission in base.request.omissions:
        console.print(omission, soft_wrap=True)
    for reason in refused:
        console.print(f"Left out: {reason}")
    own = _best([one for one in compared if one.request.runs_in_megatron])
    best = own if base.request.is_for_megatron else _best(compared)
    words = shorten(best.request.schedule)
    if best is not base:
        words += f", {best.step / base.step:.3f} times {_BASE}'s step time and "
        words += f"{best.slots / base.slots:.2f} times its slots"
    console.print(f"Recommended: {words}.", style="bold", soft_wrap=True)
    name = shorten(own.request.schedule)
    console.print(f"* Runs in Megatron with graphs; the best of these is {name}.")
    console.print("Step in forwards (F), slots in microbatches of all layers of a rank.")
    return best.request


def _best(compared: Sequence[Compared]) -> Compared:
    """Return the schedule that holds least among the fastest and those nearly as fast."""
    fastest = min(one.step for one in compared)
    near = [one for one in compared if one.step <= _TOLERANCE * fastest]
    return min(near, key=lambda one: one.memory_bytes or one.slots)

"""Compare all schedules of one pipeline, for ``chunkgraph plan --compare``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._collector import collector_paused
from chunkgraph._text import format_bytes
from chunkgraph.cli.plan_grid import Grid, too_large
from chunkgraph.cli.plan_request import Request
from chunkgraph.cli.plan_rows import plan_of, rows_of, shape_of
from chunkgraph.cli.plan_tables import RankRow, table
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    CostModel,
    PipelineShape,
    Placement,
    get_family,
    list_schedules,
    simulate,
)
from chunkgraph.slots import estimate_memory

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMPARE_HELP", "Comparison", "compare", "comparison_steps"]

COMPARE_HELP = """\
--compare plans every schedule on the same pipeline, and the CSV file. Those
with several chunks on a rank have as many as --vpp, or two, each
correspondingly smaller. `Held`: what the slots of the fullest rank hold, in
microbatches of all layers of a rank. The recommended schedule holds the least
among those within 1% of the fastest. --json prints a list with one object per
schedule:
  schedule, num_chunks, bubble_ratio, step_ms (without --costs in forwards of a
  rank), relative_step (1f1b: 1), num_slots, held_microbatches, memory_bytes
  (null without a config), runs_in_megatron, is_recommended; or schedule and
  error, if it cannot run
"""
_BASE = "1f1b"
_TOLERANCE = 1.01
_MAX_ACTIONS = 24_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One schedule of the comparison.

    Attributes:
        request: The request for this schedule alone.
        bubble_ratio: Idle share of every rank.
        step_ms: Time of the step; in forwards of a rank if no costs are known.
        num_slots: Number of slots on the rank with the most.
        memory_bytes: Estimate for the rank that needs the most; None without a model.
    """

    request: Request
    bubble_ratio: float
    step_ms: float
    num_slots: int
    memory_bytes: int | None

    @property
    def schedule(self) -> str:
        """Return the name of the schedule, or its file."""
        return self.request.schedule

    @property
    def num_chunks(self) -> int:
        """Return the number of model chunks on each rank."""
        return self.request.num_chunks

    @property
    def held_microbatches(self) -> float:
        """Return what the slots hold, in microbatches of all layers of a rank."""
        return self.num_slots / self.num_chunks

    @property
    def runs_in_megatron(self) -> bool:
        """Return whether Megatron's models can train with this schedule."""
        return self.request.placement is Placement.LOOP


@dataclass(frozen=True, slots=True)
class Comparison:
    """The schedules of one pipeline.

    Attributes:
        rows: Schedules that can run.
        refused: Reasons why the others cannot run, by name.
        has_costs: Whether steps are in ms.
        is_for_megatron: Whether only schedules that run in Megatron are recommended.
    """

    rows: tuple[Compared, ...]
    refused: Mapping[str, str]
    has_costs: bool
    is_for_megatron: bool

    @property
    def base(self) -> Compared:
        """Return 1F1B, the baseline; it runs wherever another schedule does."""
        return next(row for row in self.rows if row.schedule == _BASE)

    @property
    def recommended(self) -> Compared:
        """Return the row to use."""
        return self.best_in_megatron if self.is_for_megatron else _best(self.rows)

    @property
    def best_in_megatron(self) -> Compared:
        """Return the best row that runs in Megatron."""
        return _best([row for row in self.rows if row.runs_in_megatron])

    def as_json(self) -> list[dict[str, object]]:
        """Return the comparison for ``--json``."""
        best = self.recommended
        rows: list[dict[str, object]] = [
            {
                "schedule": row.schedule,
                "num_chunks": row.num_chunks,
                "bubble_ratio": round(row.bubble_ratio, 6),
                "step_ms": row.step_ms,
                "relative_step": round(row.step_ms / self.base.step_ms, 6),
                "num_slots": row.num_slots,
                "held_microbatches": row.held_microbatches,
                "memory_bytes": row.memory_bytes,
                "runs_in_megatron": row.runs_in_megatron,
                "is_recommended": row is best,
            }
            for row in self.rows
        ]
        return rows + [{"schedule": name, "error": error} for name, error in self.refused.items()]

    def print(self, console: Console) -> None:
        """Print the table and the recommendation."""
        unit = "ms" if self.has_costs else "F"
        headings = ["Schedule", "Chunks", "Bubble", f"Step, {unit}", "Of 1f1b", "Slots", "Held"]
        cells = [
            [
                f"{Path(row.schedule).name}{'*' if row.runs_in_megatron else ' '}",
                str(row.num_chunks),
                f"{row.bubble_ratio:.1%}",
                f"{row.step_ms:.1f}",
                f"{row.step_ms / self.base.step_ms:.3f}",
                str(row.num_slots),
                f"{row.held_microbatches:g}",
            ]
            for row in self.rows
        ]
        if self.base.memory_bytes is not None:
            headings.append("Memory")
            for line, row in zip(cells, self.rows, strict=True):
                line.append(format_bytes(row.memory_bytes or 0))
        console.print(table(headings, cells))
        for error in self.refused.values():
            console.print(f"Left out: {error}", markup=False)
        best = self.recommended
        words = best.schedule
        if best is not self.base:
            held = best.held_microbatches / self.base.held_microbatches
            words += f", {best.step_ms / self.base.step_ms:.3f} of {_BASE}'s step time, "
            words += f"{held:.2f} of its `Held`"
        console.print(f"Recommended: {words}.", style="bold", soft_wrap=True)
        own = self.best_in_megatron.schedule
        console.print(f"* Runs in Megatron; the best of these is {own}.", soft_wrap=True)


def _best(rows: Sequence[Compared]) -> Compared:
    """Return the row that holds least among the fastest and those nearly as fast."""
    fastest = min(row.step_ms for row in rows)
    near = [row for row in rows if row.step_ms <= _TOLERANCE * fastest]
    return min(near, key=lambda row: row.memory_bytes or row.held_microbatches)


@collector_paused()  # it would walk over millions of events that nothing frees
def compare(request: Request) -> Comparison:
    """Plan and time a step of every schedule.

    Raises:
        ConfigError: A step is too large to simulate.
        TopologyError: Not even 1F1B can run.
    """
    rows, refused = [], {}
    for own in _requests(request):
        try:
            rows.append(_compared(request, own))
        except TopologyError as error:
            if own.schedule == _BASE:
                raise
            refused[own.schedule] = str(error)
    has_costs = request.costs is not None
    return Comparison(tuple(rows), refused, has_costs, request.is_for_megatron)


def comparison_steps(
    request: Request, comparison: Comparison
) -> list[tuple[Grid, Sequence[RankRow]]]:
    """Simulate a step of every compared schedule, with as much work per rank as in the request.

    Raises:
        ConfigError: A step is too large to simulate.
    """
    steps: list[tuple[Grid, Sequence[RankRow]]] = []
    for row in comparison.rows:
        own = replace(row.request, costs=_costs_of(request, row.num_chunks))
        shape, ranks = shape_of(own), range(own.num_ranks)
        if (problem := too_large(shape)) is not None:
            raise ConfigError(f"plan: --compare with --html: {problem}")
        grid = Grid.of(own.build(), ranks, own.costs)
        steps.append((grid, rows_of(own, shape, ranks, grid)))
    return steps


def _requests(request: Request) -> Iterator[Request]:
    """Yield a request for every schedule by name, and for the request's own file."""
    for name in list_schedules():
        num_chunks = get_family(name).num_chunks or max(2, request.num_chunks)
        yield replace(request, schedule=name, num_chunks=num_chunks, file=None)
    if request.file is not None:
        yield request


def _compared(request: Request, own: Request) -> Compared:
    shape = shape_of(own)
    plans = [plan_of(own, rank) for rank in range(own.num_ranks)]
    bubble_ratio, step_ms = _timed(request, own, shape)
    model, shared = request.model, request.shared_slots
    return Compared(
        request=own,
        bubble_ratio=bubble_ratio,
        step_ms=step_ms,
        num_slots=max(plan.peak_in_flight if shared else plan.num_slots for plan in plans),
        memory_bytes=None
        if model is None
        else max(estimate_memory(plan, model, shared_slots=shared).total_bytes for plan in plans),
    )


def _timed(request: Request, own: Request, shape: PipelineShape) -> tuple[float, float]:
    """Return bubble ratio and time of a step with as much work per rank as in the request."""
    if request.costs is None and own.file is None:
        bubble_ratio = get_family(own.schedule).bubble_ratio(shape)
        return bubble_ratio, 3 * shape.num_microbatches / (1 - bubble_ratio)
    if (problem := too_large(shape, _MAX_ACTIONS)) is not None:
        raise ConfigError(f"plan: --compare: {problem}")
    run = simulate(own.build(), _costs_of(request, own.num_chunks))
    return run.bubble_ratio(0), run.makespan_ms


def _costs_of(request: Request, num_chunks: int) -> CostModel:
    """Return the costs of a chunk if a rank has this many; without costs, of a rank's forwards."""
    if request.costs is None:
        return CostModel().scaled(1 / num_chunks)
    return request.costs.scaled(request.num_chunks / num_chunks)

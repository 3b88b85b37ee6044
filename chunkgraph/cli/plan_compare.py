"""Compare all schedules of one pipeline, for ``chunkgraph plan --compare``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chunkgraph._text import format_bytes
from chunkgraph.cli.plan_export import MAX_DRAWN, MAX_EXPORTED, Grid, too_large
from chunkgraph.cli.plan_request import Request
from chunkgraph.cli.plan_tables import RankRow, rows_of, table
from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import CostModel, Placement, get_family, list_schedules

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Comparison", "compare", "comparison_steps"]

_BASE = "1f1b"
_TOLERANCE = 1.01
# A backward takes two forwards.
_FORWARDS_PER_MICROBATCH = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One schedule of the comparison.

    Attributes:
        request: The request for this schedule alone.
        bubble_ratio: Idle share of the rank that idles most.
        num_slots: Number of slots on the rank with the most.
        memory_bytes: Estimate for the rank that needs the most; None without a model.
    """

    request: Request
    bubble_ratio: float
    num_slots: int
    memory_bytes: int | None

    @property
    def step(self) -> float:
        """Return the time of the step, in forwards of all layers of a rank."""
        busy = _FORWARDS_PER_MICROBATCH * self.request.num_microbatches
        return busy / (1 - self.bubble_ratio)

    @property
    def peak_in_flight(self) -> float:
        """Return what the slots hold, in microbatches of all layers of a rank."""
        return self.num_slots / self.request.num_chunks

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
        is_for_megatron: Whether only schedules that run in Megatron are recommended.
    """

    rows: tuple[Compared, ...]
    refused: Mapping[str, str]
    is_for_megatron: bool

    def print(self, console: Console) -> None:
        """Print the table and the recommendation."""
        base = next(row for row in self.rows if row.request.schedule == _BASE)
        headings = ["Schedule", "Chunks", "Bubble", "Step, F", "Of 1f1b", "Peak in flight"]
        cells = [
            [
                f"{Path(row.request.schedule).name}{'*' if row.runs_in_megatron else ' '}",
                str(row.request.num_chunks),
                f"{row.bubble_ratio:.1%}",
                f"{row.step:.1f}",
                f"{row.step / base.step:.3f}",
                f"{row.peak_in_flight:g}",
            ]
            for row in self.rows
        ]
        if base.memory_bytes is not None:
            headings.append("Memory")
            for line, row in zip(cells, self.rows, strict=True):
                line.append(format_bytes(row.memory_bytes or 0))
        console.print(table(headings, cells))
        for error in self.refused.values():
            console.print(f"Left out: {error}", markup=False)
        own = _best([row for row in self.rows if row.runs_in_megatron])
        best = own if self.is_for_megatron else _best(self.rows)
        words = best.request.schedule
        if best is not base:
            words += f", {best.step / base.step:.3f} times {_BASE}'s step time and "
            words += f"{best.peak_in_flight / base.peak_in_flight:.2f} times its peak in flight"
        console.print(f"Recommended: {words}.", style="bold", soft_wrap=True, markup=False)
        console.print(f"* Runs in Megatron; the best of these is {own.request.schedule}.")
        console.print("Step in forwards (F), peak in microbatches of all layers of a rank.")


def _best(rows: Sequence[Compared]) -> Compared:
    """Return the row that holds least among the fastest and those nearly as fast."""
    fastest = min(row.step for row in rows)
    near = [row for row in rows if row.step <= _TOLERANCE * fastest]
    return min(near, key=lambda row: row.memory_bytes or row.peak_in_flight)


def compare(request: Request) -> Comparison:
    """Plan a step of every schedule.

    Raises:
        ConfigError: A step is too large to simulate.
        TopologyError: Not even 1F1B can run.
    """
    rows, refused = [], {}
    for own in _requests(request):
        if own.file is not None and (problem := too_large(own.shape(), MAX_EXPORTED)) is not None:
            raise ConfigError(f"plan: --compare: {problem}")
        try:
            planned = rows_of(own, range(own.num_ranks))
        except TopologyError as error:
            if own.schedule == _BASE:
                raise
            refused[own.schedule] = str(error)
            continue
        plans = [row.plan for row in planned]
        estimates = [row.memory for row in planned if row.memory is not None]
        compared = Compared(
            request=own,
            bubble_ratio=max(row.bubble_ratio for row in planned),
            num_slots=max(plan.num_slots for plan in plans),
            memory_bytes=max((one.total_bytes for one in estimates), default=None),
        )
        rows.append(compared)
    return Comparison(tuple(rows), refused, request.is_for_megatron)


def comparison_steps(comparison: Comparison) -> list[tuple[Grid, Sequence[RankRow]]]:
    """Simulate a step of every compared schedule, in forwards of all layers of a rank.

    Raises:
        ConfigError: A step is too large to simulate.
    """
    steps: list[tuple[Grid, Sequence[RankRow]]] = []
    for own in (row.request for row in comparison.rows):
        if (problem := too_large(own.shape(), MAX_DRAWN)) is not None:
            raise ConfigError(f"plan: --compare with --html: {problem}")
        ranks = range(own.num_ranks)
        grid = Grid.of(own.build(), ranks, CostModel().scaled(1 / own.num_chunks))
        steps.append((grid, rows_of(own, ranks, grid)))
    return steps


def _requests(request: Request) -> Iterator[Request]:
    """Yield a request for every schedule by name, and for the request's own file."""
    for name in list_schedules():
        num_chunks = get_family(name).num_chunks or max(2, request.num_chunks)
        yield replace(request, schedule=name, num_chunks=num_chunks, file=None)
    if request.file is not None:
        yield request

"""Draw a simulated step: on the terminal, as SVG, as a zoomable page or as a Perfetto trace."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from chunkgraph.schedules import (
    Action,
    CostModel,
    Op,
    PipelineShape,
    Schedule,
    Simulation,
    simulate,
)
from chunkgraph.schedules.draw_svg import colour_of
from chunkgraph.slots import assign_slots

if TYPE_CHECKING:
    from rich.console import Console

    from chunkgraph.cli.plan_tables import RankRow

MAX_DRAWN = 10_000
"""Maximum number of actions in a picture."""
MAX_EXPORTED = 100_000
"""Maximum number of actions in a page or trace, which zoom."""
_MAX_PANELS = 16
"""Maximum number of printed panels (stretches of time)."""
# Named colours: a terminal with few colours would merge finer ones.
_STYLES = {
    Op.F: "white on blue",
    Op.B: "black on green",
    Op.I: "black on cyan",
    Op.W: "black on yellow",
}
_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
_US_PER_FORWARD = 1000.0
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def too_large(shape: PipelineShape, max_actions: int = MAX_DRAWN) -> str | None:
    """Explain why a step cannot be simulated and what to do; None if it can."""
    num_actions = 2 * shape.num_microbatches * shape.num_stages
    if num_actions <= max_actions:
        return None
    return (
        f"the step has {num_actions} forwards and backwards, and at most {max_actions} are "
        "simulated. Choose fewer microbatches or stages to see how it goes"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A simulated step.

    Attributes:
        simulation: The timeline.
        slots: Slot of every (stage, microbatch).
    """

    simulation: Simulation
    slots: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, schedule: Schedule) -> Grid:
        """Simulate a schedule, in forwards of all layers of a rank."""
        costs = CostModel().scaled(1 / schedule.num_chunks)
        return cls(simulation=simulate(schedule, costs), slots=assign_slots(schedule))

    def print(self, console: Console) -> None:
        """Print the step, or its beginning, in panels: stretches of time that fit the width."""
        from rich.text import Text

        ranks = [
            [(span, self._label(span.action)) for span in spans] for spans in self.simulation.spans
        ]
        # The shortest action is just wide enough for its label and a blank, the others to scale.
        least = 1 + max(len(label) for cells in ranks for _, label in cells)
        per_ms = least / min(span.end_ms - span.start_ms for cells in ranks for span, _ in cells)
        lines = []
        for cells in ranks:
            line = Text()
            for span, label in cells:
                line.append(" " * (round(span.start_ms * per_ms) - len(line)))
                width = max(round(span.end_ms * per_ms) - len(line), least)
                # The blank after an action stays white, so that neighbours do not run together.
                line.append(label.ljust(width - 1, "-"), _STYLES[span.action.op]).append(" ")
            lines.append(line)
        heading = f"rank {len(lines) - 1} |"
        num_columns = max(1, (console.width - len(heading)) // least) * least
        starts = range(0, max(map(len, lines)), num_columns)
        for left in starts[:_MAX_PANELS]:
            right = min(left + num_columns, starts.stop)
            console.print(f"time {left / per_ms:g} to {right / per_ms:g}", style="dim")
            for rank, line in enumerate(lines):
                row = Text(f"rank {rank} |".rjust(len(heading))).append(line[left:right])
                row.rstrip()
                console.print(row, soft_wrap=True)
            console.print()
        if (rest := len(starts) - _MAX_PANELS) > 0:
            console.print(f"... {rest} more panels: --svg FILE draws them")
        chunk, where = (".1", ", chunk 1") if self.simulation.schedule.num_chunks > 1 else ("", "")
        used = {span.action.op for cells in ranks for span, _ in cells}
        names = ", ".join(f"{op.value}: {name}" for op, name in _NAMES.items() if op in used)
        console.print(f"F3{chunk}/0: microbatch 3{where}, slot 0. {names}", style="dim")

    def _label(self, action: Action) -> str:
        """Return an action's text: ``F3.1/0`` is the forward of microbatch 3, chunk 1, slot 0."""
        schedule = self.simulation.schedule
        chunk = f".{schedule.chunk_of(action.stage)}" if schedule.num_chunks > 1 else ""
        slot = self.slots[action.stage, action.microbatch]
        return f"{action.op.value}{action.microbatch}{chunk}/{slot}"


def as_html(steps: Sequence[tuple[Grid, Sequence[RankRow]]], *, title: str) -> str:
    """Return one page with the timelines of one or several schedules, one below the other.

    Args:
        steps: The simulated steps, each with the plans of its ranks.
        title: Heading of the page.
    """
    schedules = [_schedule(grid, rows) for grid, rows in steps]
    has_memory = all(rows[0].memory is not None for _, rows in steps)
    data = json.dumps({"has_memory": has_memory, "schedules": schedules}, separators=(",", ":"))
    # Within a script element, "<" can end it or hide its end.
    values = {"title": html.escape(title), "data": data.replace("<", "\\u003c")}
    page = resources.files("chunkgraph.cli").joinpath("plan_page.html").read_text("utf-8")
    return _PLACE.sub(lambda place: values[place[1]], page)


def as_trace(grid: Grid) -> str:
    """Return a step in Chrome's trace format: a thread per rank, and its slots in use."""
    run = grid.simulation
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": run.schedule.name}}
    ]
    for rank in range(run.schedule.num_ranks):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        num_in_use = 0
        for op, microbatch, chunk, slot, start, end in _actions(grid, rank):
            start_us, end_us = start * _US_PER_FORWARD, end * _US_PER_FORWARD
            events.append(
                {
                    "ph": "X",
                    "name": f"{op}{microbatch}",
                    "cat": _NAMES[Op(op)],
                    "pid": 0,
                    "tid": rank,
                    "ts": start_us,
                    "dur": end_us - start_us,
                    "args": {"microbatch": microbatch, "chunk": chunk, "slot": slot},
                }
            )
            # A forward takes a slot, and the last part of its backward gives it back.
            if change := 1 if Op(op) is Op.F else -int(Op(op).ends_lifetime):
                num_in_use += change
                at_us = start_us if change > 0 else end_us
                counter = {"ph": "C", "name": f"slots in use, rank {rank}", "pid": 0, "ts": at_us}
                events.append({**counter, "args": {"slots": num_in_use}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _schedule(grid: Grid, rows: Sequence[RankRow]) -> Mapping[str, Any]:
    run = grid.simulation
    num_chunks = run.schedule.num_chunks
    chunks = range(num_chunks)
    estimates = [row.memory for row in rows if row.memory is not None]
    return {
        "name": run.schedule.name,
        "num_chunks": num_chunks,
        "makespan": run.makespan_ms,
        "bubble_ratio": max(row.bubble_ratio for row in rows),
        "num_slots": max(row.plan.num_slots for row in rows),
        "memory_bytes": max((one.total_bytes for one in estimates), default=None),
        "slot_bytes": estimates[0].slot_bytes_per_chunk[0] if estimates else None,
        "colours": {op.value: [colour_of(op, c, num_chunks) for c in chunks] for op in _NAMES},
        "ranks": [{"rank": r, "actions": list(_actions(grid, r))} for r in range(len(rows))],
    }


def _actions(grid: Grid, rank: int) -> Iterator[tuple[str, int, int, int, float, float]]:
    """Yield operation, microbatch, chunk, slot, start and end of a rank's actions."""
    schedule = grid.simulation.schedule
    for span in grid.simulation.spans[rank]:
        action = span.action
        yield (
            action.op.value,
            action.microbatch,
            schedule.chunk_of(action.stage),
            grid.slots[action.stage, action.microbatch],
            round(span.start_ms, 6),
            round(span.end_ms, 6),
        )

"""Export a simulated step as a zoomable page (``--html``) or a Perfetto trace (``--trace``)."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from chunkgraph.cli.plan_grid import Grid
from chunkgraph.schedules import Op
from chunkgraph.schedules.draw_svg import colour_of

if TYPE_CHECKING:
    from chunkgraph.cli.plan_tables import RankRow

__all__ = ["as_html", "as_trace"]

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "input gradient", Op.W: "weight gradient"}
_US_PER_MS = 1000.0


def as_html(steps: Sequence[tuple[Grid, Sequence[RankRow]]], *, title: str, has_costs: bool) -> str:
    """Return one page with the timelines of one or several schedules, one below the other.

    Args:
        steps: The simulated steps, each with the plans of its ranks.
        title: Heading of the page.
        has_costs: Whether times are milliseconds; otherwise they count forwards.
    """
    schedules = [_schedule(grid, rows) for grid, rows in steps]
    has_memory = all(rows[0].memory is not None for _, rows in steps)
    data = {"has_costs": has_costs, "has_memory": has_memory, "schedules": schedules}
    page = resources.files("chunkgraph.cli").joinpath("plan_page.html").read_text("utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return page.replace("{{title}}", html.escape(title)).replace("{{data}}", text)


def as_trace(grid: Grid) -> str:
    """Return a step in Chrome's trace format: a thread per rank, and its slots in use."""
    run = grid.simulation
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": run.schedule.name}}
    ]
    for rank in grid.ranks:
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
        num_in_use = 0
        for op, microbatch, chunk, slot, start_ms, end_ms in _actions(grid, rank):
            times = {"ts": start_ms * _US_PER_MS, "dur": (end_ms - start_ms) * _US_PER_MS}
            events.append(
                {
                    "ph": "X",
                    "name": f"{op}{microbatch}",
                    "cat": _NAMES[Op(op)],
                    "pid": 0,
                    "tid": rank,
                    **times,
                    "args": {"microbatch": microbatch, "chunk": chunk, "slot": slot},
                }
            )
            counter = {"ph": "C", "name": f"slots in use, rank {rank}", "pid": 0}
            if Op(op) is Op.F:
                num_in_use += 1
                events.append({**counter, "ts": times["ts"], "args": {"slots": num_in_use}})
            elif Op(op).ends_lifetime:
                num_in_use -= 1
                end_us = end_ms * _US_PER_MS
                events.append({**counter, "ts": end_us, "args": {"slots": num_in_use}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _schedule(grid: Grid, rows: Sequence[RankRow]) -> Mapping[str, Any]:
    run = grid.simulation
    num_chunks = run.schedule.num_chunks
    num_slots = max(grid.slots.values(), default=0) + 1
    colours = [[colour_of(c, s, num_chunks) for s in range(num_slots)] for c in range(num_chunks)]
    estimates = [row.memory for row in rows if row.memory is not None]
    return {
        "name": run.schedule.name,
        "num_chunks": num_chunks,
        "makespan": run.makespan_ms,
        "bubble_ratio": max(row.bubble_ratio for row in rows),
        "num_slots": max(row.plan.num_slots for row in rows),
        "memory_bytes": max((one.total_bytes for one in estimates), default=None),
        "slot_bytes": estimates[0].slot_bytes_per_chunk[0] if estimates else None,
        "colours": colours,
        "ranks": [{"rank": rank, "actions": list(_actions(grid, rank))} for rank in grid.ranks],
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

"""Draw a simulated schedule as text: time to the right, a row per rank, wrapped to the width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.schedule import Schedule
from chunkgraph.schedules.simulate import Simulation

__all__ = ["Cell", "Panel", "legend", "text_panels"]

_MIN_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Cell:
    """The characters of an action, of a part of one, or of a bubble.

    Attributes:
        text: the text to print, as wide as its time.
        op: the operation; None for a bubble.
    """

    text: str
    op: Op | None


@dataclass(frozen=True, slots=True)
class Panel:
    """The part of the timeline that fits the width.

    Attributes:
        start_ms: simulated time of the left edge.
        end_ms: simulated time of the right edge.
        rows: number and cells, from left to right, of each rank.
    """

    start_ms: float
    end_ms: float
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]


def label(
    action: Action, num_ranks: int, num_chunks: int, slots: Mapping[tuple[int, int], int]
) -> str:
    """Return an action's text: ``F3.1/0`` is the forward of microbatch 3 on chunk 1 in slot 0."""
    chunk = f".{action.stage // num_ranks}" if num_chunks > 1 else ""
    slot = slots[action.stage, action.microbatch]
    return f"{action.op.value}{action.microbatch}{chunk}/{slot}"


def legend(schedule: Schedule) -> str:
    """Return one line that explains a cell."""
    has_chunks = schedule.num_chunks > 1
    cell, chunk = ("F3.1/0", ", chunk 1") if has_chunks else ("F3/0", "")
    ops = {action.op for _, action in schedule}
    if Op.I not in ops:
        others = "B: backward"
    else:
        others = "B: backward; I, W: its halves" if Op.B in ops else "I/W: input/weight grad"
    return f"{cell}: forward of microbatch 3{chunk}, slot 0; {others}"


def text_panels(
    simulation: Simulation, *, slots: Mapping[tuple[int, int], int], width: int = 80
) -> tuple[Panel, ...]:
    """Divide a timeline into panels of cells.

    The shortest action is just wide enough for its label; all others are to scale.

    Args:
        simulation: the timeline.
        slots: slot of every (stage, microbatch) for the labels.
        width: characters per line, including the row label; at least 40.
    """
    schedule, costs = simulation.schedule, simulation.costs
    shown = range(schedule.num_ranks)
    labels = {
        action: label(action, schedule.num_ranks, schedule.num_chunks, slots)
        for rank in shown
        for action in schedule.compute_actions(rank)
    }
    # Every action ends with a blank, which separates neighbours without colour.
    unit_chars = 1 + max(map(len, labels.values()))
    unit_ms = min(costs[action.stage].duration_ms(action.op) for action in labels)
    num_columns = max(width, _MIN_WIDTH) - len(f"rank {max(shown)} |")
    num_columns = max(unit_chars, num_columns - num_columns % unit_chars)
    lines = {rank: _line(simulation, rank, labels, unit_ms, unit_chars) for rank in shown}
    total = max(_column(simulation.makespan_ms, unit_ms, unit_chars), *map(len, lines.values()))
    for line in lines.values():
        line.extend([(" ", None)] * (total - len(line)))
    panels = []
    for left in range(0, total, num_columns):
        right = min(left + num_columns, total)
        panels.append(
            Panel(
                start_ms=left / unit_chars * unit_ms,
                end_ms=right / unit_chars * unit_ms,
                rows=tuple((rank, _cut(lines[rank], left, right)) for rank in shown),
            )
        )
    return tuple(panels)


def _column(time_ms: float, unit_ms: float, unit_chars: int) -> int:
    # Round, so that equal actions are equally wide wherever they start.
    return int(time_ms / unit_ms * unit_chars + 0.5)


def _line(
    simulation: Simulation,
    rank: int,
    labels: Mapping[Action, str],
    unit_ms: float,
    unit_chars: int,
) -> list[tuple[str, Op | None]]:
    """Return the character and the operation of each column."""
    line: list[tuple[str, Op | None]] = []
    for span in simulation.spans[rank]:
        start = max(_column(span.start_ms, unit_ms, unit_chars), len(line))
        end = max(_column(span.end_ms, unit_ms, unit_chars), start + unit_chars)
        line.extend([(" ", None)] * (start - len(line)))
        text = f"{labels[span.action]:-<{end - start - 1}} "
        line.extend((character, span.action.op) for character in text)
    return line


def _cut(line: Sequence[tuple[str, Op | None]], left: int, right: int) -> tuple[Cell, ...]:
    """Group the columns of a panel into cells; the gap character ends a cell."""
    cells: list[Cell] = []
    text = ""
    for column in range(left, right):
        character, op = line[column]
        text += character
        is_end = column + 1 == right or line[column + 1][1] is not op
        if is_end or (op is not None and character == " "):
            cells.append(Cell(text, op))
            text = ""
    return tuple(cells)

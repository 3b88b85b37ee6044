"""Draw a simulated schedule as an SVG picture, without a plotting library."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .action import Op
from .simulate import Simulation, Span

__all__ = ["COLOURS", "draw_svg"]

COLOURS: Mapping[Op, str] = {
    Op.F: "#a9cbf5",
    Op.B: "#a8ddb0",
    Op.I: "#8fdcd6",
    Op.W: "#fbcf92",
}
"""Fill colour of every operation. Bubbles are white."""

_NAMES = {
    Op.F: "F: forward",
    Op.B: "B: backward",
    Op.I: "I: input gradient",
    Op.W: "W: weight gradient",
}
_FONT = "font-family='DejaVu Sans, Verdana, Arial, sans-serif'"
_MARGIN = 16.0
_RANK_LABEL_WIDTH = 58.0
_ROW_HEIGHT = 40.0
_PANEL_GAP = 34.0
_HEADER_HEIGHT = 78.0
_TITLE_SIZE, _TEXT_SIZE, _MICROBATCH_SIZE, _DETAIL_SIZE = 15.0, 11.0, 12.0, 8.5
# Width of a character divided by the font size, slightly more than the fonts above need.
_EM = 0.66


@dataclass(frozen=True, slots=True)
class _Layout:
    px_per_ms: float
    panel_ms: float
    num_panels: int
    ranks: tuple[int, ...]
    makespan_ms: float
    min_width: float

    @property
    def left(self) -> float:
        return _MARGIN + _RANK_LABEL_WIDTH

    @property
    def width(self) -> float:
        longest = min(self.panel_ms, self.makespan_ms)
        return max(self.left + longest * self.px_per_ms + _MARGIN, self.min_width)

    @property
    def panel_height(self) -> float:
        return _ROW_HEIGHT * len(self.ranks) + _PANEL_GAP

    @property
    def height(self) -> float:
        return _HEADER_HEIGHT + self.panel_height * self.num_panels + 4.0

    def top(self, panel: int) -> float:
        return _HEADER_HEIGHT + self.panel_height * panel


def draw_svg(
    simulation: Simulation,
    *,
    slots: Mapping[tuple[int, int], int] | None = None,
    title: str | None = None,
    max_width_px: float = 1240.0,
    ranks: Sequence[int] | None = None,
) -> str:
    """Draw a timeline: a row per rank, a box per action with microbatch, chunk and slot.

    Args:
        simulation: the timeline.
        slots: slot of every (stage, microbatch) for the boxes; None: no slots.
        title: heading; None: derived from the sizes.
        max_width_px: beyond this width, time wraps into further panels.
        ranks: ranks to draw; None: all.

    Returns:
        A complete SVG document.
    """
    schedule, costs = simulation.schedule, simulation.costs
    shown = tuple(range(schedule.num_ranks) if ranks is None else ranks)
    present = [op for op in COLOURS if any(action.op is op for _, action in schedule)]
    heading = _default_title(simulation) if title is None else title
    how_to_read = _how_to_read(schedule.num_chunks, has_slots=slots is not None)
    # The box of the shortest action must hold the longest label.
    durations = (costs[a.stage].duration_ms(a.op) for _, a in schedule if a.op in present)
    unit_ms = min(durations, default=1.0)
    widest = max((_box_text_width(simulation, slots, rank) for rank in shown), default=0.0)
    px_per_ms = (widest + 5.0) / unit_ms
    room_px = max(max_width_px - 2 * _MARGIN - _RANK_LABEL_WIDTH, widest + 5.0)
    num_units = max(1, int(room_px / px_per_ms / unit_ms))
    makespan = simulation.makespan_ms
    layout = _Layout(
        px_per_ms=px_per_ms,
        panel_ms=num_units * unit_ms,
        num_panels=max(1, -int(-makespan // (num_units * unit_ms))),
        ranks=shown,
        makespan_ms=makespan,
        min_width=2 * _MARGIN
        + max(
            len(heading) * _TITLE_SIZE * _EM,
            len(how_to_read) * _TEXT_SIZE * _EM,
            sum(_legend_width(op) for op in present),
        ),
    )
    width, height = layout.width, layout.height
    size = f"width='{width:.0f}' height='{height:.0f}'"
    view = f"viewBox='0 0 {width:.0f} {height:.0f}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {view} {_FONT}>",
        f"<title>{escape(heading)}</title>",
        f"<rect {size} fill='white'/>",
        _text(_MARGIN, 25.0, heading, _TITLE_SIZE, weight="bold"),
        _text(_MARGIN, 44.0, how_to_read, _TEXT_SIZE, colour="#555"),
        *_legend(present),
    ]
    for panel in range(layout.num_panels):
        parts.extend(_panel(simulation, layout, panel, slots))
    parts.append("</svg>\n")
    return "\n".join(parts)


def _default_title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    ranks = "1 rank" if schedule.num_ranks == 1 else f"{schedule.num_ranks} ranks"
    count = schedule.num_microbatches
    return f"{schedule.name}: {ranks}{chunks}, {count} microbatch{'es' if count != 1 else ''}"


def _how_to_read(num_chunks: int, *, has_slots: bool) -> str:
    small = [
        word for word, is_there in (("c chunk", num_chunks > 1), ("s slot", has_slots)) if is_there
    ]
    below = f"; small: {', '.join(small)}" if small else ""
    return f"In a box: microbatch{below}. White: idle."


def _box_texts(
    simulation: Simulation, slots: Mapping[tuple[int, int], int] | None, span: Span
) -> tuple[str, str]:
    """Return the large and the small text of a box."""
    schedule, action = simulation.schedule, span.action
    chunk = f"c{schedule.chunk_of(action.stage)}" if schedule.num_chunks > 1 else ""
    slot = "" if slots is None else f"s{slots[action.stage, action.microbatch]}"
    return str(action.microbatch), f"{chunk} {slot}".strip()


def _box_text_width(
    simulation: Simulation, slots: Mapping[tuple[int, int], int] | None, rank: int
) -> float:
    widths = [0.0]
    for span in simulation.spans[rank]:
        large, small = _box_texts(simulation, slots, span)
        widths.append(len(large) * _MICROBATCH_SIZE * _EM)
        widths.append(len(small) * _DETAIL_SIZE * _EM)
    return max(widths)


def _panel(
    simulation: Simulation,
    layout: _Layout,
    panel: int,
    slots: Mapping[tuple[int, int], int] | None,
) -> Iterator[str]:
    start_ms = panel * layout.panel_ms
    end_ms = min(start_ms + layout.panel_ms, layout.makespan_ms)
    top = layout.top(panel)
    right = layout.left + (end_ms - start_ms) * layout.px_per_ms
    for row, rank in enumerate(layout.ranks):
        y = top + row * _ROW_HEIGHT
        middle = y + _ROW_HEIGHT / 2 + _TEXT_SIZE * 0.36
        yield _text(layout.left - 8.0, middle, f"rank {rank}", _TEXT_SIZE, anchor="end")
        spans = simulation.spans[rank]
        first = bisect_right(spans, start_ms, key=lambda span: span.end_ms)
        end = bisect_left(spans, end_ms, key=lambda span: span.start_ms)
        for span in spans[first:end]:
            yield from _box(simulation, layout, span, (start_ms, end_ms), y, slots)
    bottom = top + len(layout.ranks) * _ROW_HEIGHT
    yield (
        f"<path d='M{layout.left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}' fill='none' "
        "stroke='#999' stroke-width='1'/>"
    )
    yield _text(layout.left, bottom + 14.0, f"time {start_ms:g}", 9.5, colour="#777")
    yield _text(right, bottom + 14.0, f"{end_ms:g}", 9.5, colour="#777", anchor="end")


def _box(
    simulation: Simulation,
    layout: _Layout,
    span: Span,
    window_ms: tuple[float, float],
    y: float,
    slots: Mapping[tuple[int, int], int] | None,
) -> Iterator[str]:
    """Yield the part of an action inside a panel; only the larger part has the text."""
    start, end = max(span.start_ms, window_ms[0]), min(span.end_ms, window_ms[1])
    x = layout.left + (start - window_ms[0]) * layout.px_per_ms
    width = (end - start) * layout.px_per_ms
    yield (
        f"<rect x='{x:.1f}' y='{y + 2:.1f}' width='{width:.1f}' height='{_ROW_HEIGHT - 4:.1f}' "
        f"fill='{COLOURS[span.action.op]}' stroke='#666' stroke-width='0.7'/>"
    )
    part, whole = end - start, span.end_ms - span.start_ms
    is_first_half = start == span.start_ms and part >= whole / 2
    if not is_first_half and part <= whole / 2:
        return
    centre = x + width / 2
    large, small = _box_texts(simulation, slots, span)
    large_y = y + _ROW_HEIGHT / 2 + (-1.0 if small else 4.5)
    yield _text(centre, large_y, large, _MICROBATCH_SIZE, anchor="middle")
    if small:
        yield _text(
            centre, y + _ROW_HEIGHT - 9.0, small, _DETAIL_SIZE, anchor="middle", colour="#333"
        )


def _legend_width(op: Op) -> float:
    return 18.0 + len(_NAMES[op]) * _TEXT_SIZE * _EM + 14.0


def _legend(present: Sequence[Op]) -> Iterator[str]:
    x = _MARGIN
    for op in present:
        yield (
            f"<rect x='{x:.1f}' y='54' width='12' height='12' fill='{COLOURS[op]}' "
            "stroke='#666' stroke-width='0.7'/>"
        )
        yield _text(x + 18.0, 64.0, _NAMES[op], _TEXT_SIZE)
        x += _legend_width(op)


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    *,
    anchor: str = "start",
    colour: str = "#111",
    weight: str = "normal",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' text-anchor='{anchor}' "
        f"fill='{colour}' font-weight='{weight}'>{escape(text)}</text>"
    )

"""Draw a simulated schedule as an SVG picture, without any plotting library.

A box is an action. Its colour is its operation, lighter for later chunks; a bar below the boxes is
a slot, from the forward of a microbatch to the backward that frees it. Of many microbatches the
steady state is left out.
"""

from __future__ import annotations

import colorsys
import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chunkgraph._text import counted
from chunkgraph.schedules.action import Op
from chunkgraph.schedules.simulate import Simulation, Span

_HUES = {Op.F: 0.58, Op.B: 0.36, Op.I: 0.49, Op.W: 0.13}
_NAMES = {
    Op.F: "F forward",
    Op.B: "B backward",
    Op.I: "I input gradient",
    Op.W: "W weight gradient",
}
_FONT = "font-family='DejaVu Sans, Verdana, Arial, sans-serif'"
_MARGIN = 16.0
_RANK_LABEL_WIDTH = 58.0
_BOX_HEIGHT = 34.0
_LANE_HEIGHT = 5.0
_ROW_GAP = 10.0
_HEADER_HEIGHT = 104.0
_FOOTER_HEIGHT = 30.0
_TITLE_SIZE, _TEXT_SIZE, _ACTION_SIZE, _DETAIL_SIZE = 15.0, 11.0, 12.0, 8.5
# Width of one character over the font size, a little more than the fonts above need.
_EM = 0.66
_MAX_WHOLE = 16
"""Number of microbatches up to which all are drawn."""
_FOLD_WIDTH = 40.0
# Only texts in boxes, which keep their colours, are centred.
_DARK = """<style>@media (prefers-color-scheme: dark) {
  .back { fill: #0d1117 }
  text:not([text-anchor=middle]) { fill: #e6edf3 }
}</style>"""
_Slots = Mapping[tuple[int, int], int]


@dataclass(frozen=True, slots=True)
class _Picture:
    """What is drawn and where.

    Attributes:
        simulation: The timeline.
        slots: Slot of every (stage, microbatch).
        px_per_ms: Horizontal scale.
        lanes: For every rank, the number of the bar of each (chunk, slot).
        fold: The time that is left out, from and to.
    """

    simulation: Simulation
    slots: _Slots
    px_per_ms: float
    lanes: Sequence[Mapping[tuple[int, int], int]]
    fold: tuple[float, float]

    @property
    def left(self) -> float:
        return _MARGIN + _RANK_LABEL_WIDTH

    def x(self, ms: float) -> float:
        start, stop = self.fold
        ms, fold = (ms, 0.0) if ms <= start else (max(start, ms - stop + start), _FOLD_WIDTH)
        return self.left + ms * self.px_per_ms + fold * (stop > start)

    def hides(self, start_ms: float, end_ms: float) -> bool:
        return self.fold[0] <= start_ms < end_ms <= self.fold[1]

    def row_height(self, rank: int) -> float:
        return _BOX_HEIGHT + _LANE_HEIGHT * len(self.lanes[rank]) + _ROW_GAP

    @property
    def height(self) -> float:
        return _HEADER_HEIGHT + sum(map(self.row_height, range(len(self.lanes)))) + _FOOTER_HEIGHT

    def key_of(self, span: Span) -> tuple[int, int]:
        """Return the chunk and the slot of an action."""
        action = span.action
        chunk = self.simulation.schedule.chunk_of(action.stage)
        return chunk, self.slots[action.stage, action.microbatch]

    def fill_of(self, span: Span, op: Op) -> str:
        return colour_of(op, self.key_of(span)[0], self.simulation.schedule.num_chunks)

    def texts_of(self, span: Span) -> tuple[str, str]:
        """Return the large and the small text of a box."""
        chunk, slot = self.key_of(span)
        has_chunks = self.simulation.schedule.num_chunks > 1
        small = f"c{chunk} s{slot}" if has_chunks else f"s{slot}"
        return f"{span.action.op.value}{span.action.microbatch}", small


def colour_of(op: Op, chunk: int, num_chunks: int) -> str:
    """Return the colour of an action: the hue is the operation's, the shade the chunk's."""
    lightness = 0.62 + 0.24 * chunk / (num_chunks - 1) if num_chunks > 1 else 0.68
    channels = colorsys.hls_to_rgb(_HUES[op], lightness, 0.55)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def draw_svg(simulation: Simulation, *, slots: _Slots) -> str:
    """Draw a timeline: a row per rank, a box per action with microbatch, chunk and slot.

    Args:
        simulation: The timeline.
        slots: Slot of every (stage, microbatch).

    Returns:
        A complete SVG document, as wide as the step is long.
    """
    picture = _picture(simulation, slots)
    heading = _title(simulation)
    if picture.fold[1]:
        share = (picture.fold[1] - picture.fold[0]) / simulation.busy_ms(0)
        left_out = round(share * simulation.schedule.num_microbatches)
        heading += f", {left_out} of them left out at the dashed lines"
    legend, legend_width = _legend(picture)
    width = max(
        picture.x(simulation.makespan_ms) + _MARGIN,
        2 * _MARGIN + len(heading) * _TITLE_SIZE * _EM,
        legend_width + _MARGIN,
    )
    size = f"width='{width:.0f}' height='{picture.height:.0f}'"
    view = f"viewBox='0 0 {width:.0f} {picture.height:.0f}'"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {view} {_FONT}>",
        f"<title>{html.escape(heading, quote=False)}</title>",
        _DARK,
        f"<rect class='back' {size} fill='white'/>",
        _text(_MARGIN, 25.0, heading, _TITLE_SIZE, weight="bold"),
        *legend,
    ]
    y = _HEADER_HEIGHT
    for rank in range(len(picture.lanes)):
        parts.extend(_row(picture, rank, y))
        y += picture.row_height(rank)
    parts += [*_axis(picture, y), "</svg>\n"]
    return "\n".join(parts)


def _picture(simulation: Simulation, slots: _Slots) -> _Picture:
    flat = _Picture(simulation, slots, 1.0, (), (0.0, 0.0))
    spans = [span for of_rank in simulation.spans for span in of_rank]
    # Boxes of the shortest action hold the longest label.
    unit_ms = min((span.end_ms - span.start_ms for span in spans), default=1.0)
    widest = max((_width_of(flat.texts_of(span)) for span in spans), default=0.0)
    lanes = []
    for of_rank in simulation.spans:
        keys = sorted({flat.key_of(span) for span in of_rank})
        lanes.append({key: lane for lane, key in enumerate(keys)})
    return _Picture(simulation, slots, (widest + 5.0) / unit_ms, lanes, _fold(simulation))


def _fold(simulation: Simulation) -> tuple[float, float]:
    """Return the part of the steady state to leave out: as many whole periods as it has.

    A period is the time after which all ranks do the same with later microbatches.
    """
    schedule, end_ms = simulation.schedule, simulation.makespan_ms
    starts = {span.action: span.start_ms for spans in simulation.spans for span in spans}
    if schedule.num_microbatches > _MAX_WHOLE:
        per_microbatch_ms = simulation.busy_ms(0) / schedule.num_microbatches
        for num_microbatches in range(1, 2 * schedule.num_ranks + 1):
            period_ms = num_microbatches * per_microbatch_ms
            breaks = [0.0, end_ms]
            for (action, start_ms), sign in itertools.product(starts.items(), (-1, 1)):
                other = replace(action, microbatch=action.microbatch + sign * num_microbatches)
                if not math.isclose(starts.get(other, -1.0), start_ms + sign * period_ms):
                    breaks.append(start_ms)
            breaks.sort()
            first_ms, stop_ms = max(itertools.pairwise(breaks), key=lambda two: two[1] - two[0])
            first_ms += per_microbatch_ms  # one microbatch of the steady state is drawn
            num_periods = math.floor((stop_ms - first_ms) / period_ms + 1e-6)
            if num_periods > 0:
                return first_ms, first_ms + num_periods * period_ms
    return 0.0, 0.0


def _title(simulation: Simulation) -> str:
    schedule = simulation.schedule
    chunks = f", {schedule.num_chunks} chunks each" if schedule.num_chunks > 1 else ""
    ranks = counted(schedule.num_ranks, "rank")
    return f"{schedule.name}: {ranks}{chunks}, {counted(schedule.num_microbatches, 'microbatch')}"


def _width_of(texts: tuple[str, str]) -> float:
    large, small = texts
    return max(len(large) * _ACTION_SIZE * _EM, len(small) * _DETAIL_SIZE * _EM)


def _row(picture: _Picture, rank: int, y: float) -> Iterator[str]:
    label_y = y + _BOX_HEIGHT / 2 + _TEXT_SIZE * 0.36
    yield _text(picture.left - 8.0, label_y, f"rank {rank}", _TEXT_SIZE, anchor="end")
    spans = picture.simulation.spans[rank]
    for span in spans:
        if not picture.hides(span.start_ms, span.end_ms):
            x, end = picture.x(span.start_ms), picture.x(span.end_ms)
            fill = picture.fill_of(span, span.action.op)
            yield from _box(x, y, end - x, fill, picture.texts_of(span))
    begins: dict[tuple[int, int], float] = {}
    for span in spans:
        key = picture.key_of(span)
        if span.action.op is Op.F:
            begins[key] = span.start_ms
        elif span.action.op.ends_lifetime and not picture.hides(begins[key], span.end_ms):
            bar_y = y + _BOX_HEIGHT + 1.5 + _LANE_HEIGHT * picture.lanes[rank][key]
            x, end = picture.x(begins[key]), picture.x(span.end_ms)
            yield _bar(x + 1.0, bar_y, end - x - 2.0, picture.fill_of(span, Op.F))


def _box(x: float, y: float, width: float, fill: str, texts: tuple[str, str]) -> Iterator[str]:
    yield (
        f"<rect class='action' x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' "
        f"height='{_BOX_HEIGHT:.1f}' fill='{fill}' stroke='#444' stroke-width='0.7'/>"
    )
    large, small = texts
    centre = x + width / 2
    yield _text(centre, y + _BOX_HEIGHT / 2 - 1.0, large, _ACTION_SIZE, anchor="middle")
    small_y = y + _BOX_HEIGHT - 6.5
    yield _text(centre, small_y, small, _DETAIL_SIZE, anchor="middle", colour="#222")


def _bar(x: float, y: float, width: float, fill: str) -> str:
    return (
        f"<rect class='slot' x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' "
        f"height='{_LANE_HEIGHT - 2:.1f}' rx='1.5' fill='{fill}'/>"
    )


def _axis(picture: _Picture, y: float) -> Iterator[str]:
    makespan, bottom = picture.simulation.makespan_ms, y - _ROW_GAP / 2
    right = picture.x(makespan)
    yield (
        f"<path d='M{picture.left:.1f} {_HEADER_HEIGHT:.1f}V{bottom:.1f}H{right:.1f}' fill='none' "
        "stroke='#999' stroke-width='1'/>"
    )
    yield _text(picture.left, bottom + 15.0, "time 0", 9.5, colour="#666")
    yield _text(right, bottom + 15.0, f"{makespan:g}", 9.5, colour="#666", anchor="end")
    if picture.fold[1]:
        x, fold_height = picture.x(picture.fold[0]), bottom - _HEADER_HEIGHT + 8.0
        yield (
            f"<rect class='back' x='{x:.1f}' y='{_HEADER_HEIGHT - 4:.1f}' width='{_FOLD_WIDTH}' "
            f"height='{fold_height:.1f}' fill='white' stroke='#999' stroke-dasharray='4 3'/>"
        )
        sides = (x - 3.0, "end"), (x + _FOLD_WIDTH + 3.0, "start")
        for ms, (side, anchor) in zip(picture.fold, sides, strict=True):
            yield _text(side, bottom + 15.0, f"{ms:g}", 9.5, colour="#666", anchor=anchor)


def _legend(picture: _Picture) -> tuple[list[str], float]:
    """Draw a labelled box, the meaning of the colours and the operations; return its right end."""
    schedule, y = picture.simulation.schedule, 40.0
    has_chunks = schedule.num_chunks > 1
    fill = colour_of(Op.F, int(has_chunks), schedule.num_chunks)
    parts = list(_box(_MARGIN, y, 44.0, fill, ("F2", "c1 s0" if has_chunks else "s0")))
    parts.append(_bar(_MARGIN, y + _BOX_HEIGHT + 3.0, 44.0, fill))
    x = _MARGIN + 52.0
    chunk, shade = (", chunk 1", " A shade is a chunk.") if has_chunks else ("", "")
    lines = [
        f"forward of microbatch 2{chunk}, slot 0",
        f"The bar below is a slot, from its forward to its release.{shade}",
    ]
    for number, line in enumerate(lines):
        parts.append(_text(x, y + 10.0 + 15.0 * number, line, _TEXT_SIZE, colour="#333"))
    right = x + max(map(len, lines)) * _TEXT_SIZE * _EM
    for op in (op for op in _NAMES if any(action.op is op for _, action in schedule)):
        fill = colour_of(op, 0, schedule.num_chunks)
        parts.append(f"<rect x='{x:.1f}' y='{y + 31.0}' width='10' height='10' fill='{fill}'/>")
        parts.append(_text(x + 14.0, y + 40.0, _NAMES[op], _TEXT_SIZE, colour="#333"))
        x += 26.0 + len(_NAMES[op]) * _TEXT_SIZE * _EM
    return parts, max(x, right)


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
        f"fill='{colour}' font-weight='{weight}'>{html.escape(text, quote=False)}</text>"
    )

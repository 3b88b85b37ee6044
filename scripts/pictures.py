"""Draw the pictures of the documentation, and write README's figures: ``make pictures``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = (
    *("h200_s256", "h200_s1024", "h200_s4096", "h200_fp8_s4096"),
    *("h200_dropless_s1024", "h200_llama_8b"),
)
"""Documents in `benchmarks/` that `benchmarks/training.py --json` wrote: the rows of README."""
_COLUMNS = (
    "Sequence",
    "Layers x hidden size",
    "Eager",
    "Per-layer graphs",
    "Chunk graphs",
    "Of eager's time",
    "Of eager's memory",
)
_PER_LAYER = ("local", "transformer_engine")
"""Megatron's graphs of layers, of which README has the faster."""
_LEFT, _TOP, _PX, _BOX, _LANE, _GAP = 62, 62, 29, 26, 17, 14
_COLOURS = ("#8fb4e3", "#f0b27a", "#93d3a2")
"""Of slots."""
_STYLE = """<style>
  text { font: 12px 'DejaVu Sans', Verdana, Arial, sans-serif; fill: #111 }
  .out { fill: #333 }
  @media (prefers-color-scheme: dark) { .back { fill: #0d1117 } .out { fill: #e6edf3 } }
</style>"""


def figures() -> str:
    """Return README's table: settings, times of a step, and time and reserved memory of eager's."""
    lines = [" | ".join(_COLUMNS), "|".join(["---"] * len(_COLUMNS))]
    for name in FIGURES:
        path = ROOT / "benchmarks" / f"{name}.json"
        document = json.loads(path.read_text(encoding="utf-8"))
        model = document["settings"]["model"]
        experts = document["settings"]["moe"]["num_moe_experts"]
        kind = f"{model['num_layers']} x {model['hidden_size']}"
        kind += (", FP8" if model.get("fp8") else "") + (f", {experts} experts" if experts else "")
        variants = {one["name"]: one for one in document["variants"] if one["rounds"]}
        eager, chunk = variants["eager"], variants["chunk"]
        of_layers = [v["step_ms"] for n, v in variants.items() if n in _PER_LAYER]
        times = (eager["step_ms"], min(of_layers, default=None), chunk["step_ms"])
        cells = [
            f"[{model['seq_length']}](benchmarks/{name}.json)",
            kind,
            *(f"{ms:.0f} ms" if ms else "-" for ms in times),
            *(f"{chunk[key] / eager[key]:.2f}" for key in ("step_ms", "reserved_bytes")),
        ]
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def write_figures(page: Path) -> None:
    """Replace the table of figures in a page."""
    text, heading = page.read_text(encoding="utf-8"), re.escape(f"{_COLUMNS[0]} |")
    table = re.compile(rf"^{heading}.*(?:\n.*\|.*)*", re.MULTILINE)
    assert table.search(text), f"{page} has no table of figures"
    page.write_text(table.sub(lambda _: figures(), text), encoding="utf-8")


def slot_picture() -> str:
    """Draw how microbatches take slots and give them back, on three ranks of a 1F1B step."""
    from chunkgraph.schedules import build_schedule, simulate
    from chunkgraph.slots import assign_slots

    schedule = build_schedule("1f1b", num_ranks=3, num_microbatches=6)
    simulation, slots = simulate(schedule), assign_slots(schedule)
    parts, y = [], _TOP
    for rank, spans in enumerate(simulation.spans):
        parts.append(_text(_LEFT - 8, y + 17, f"rank {rank}", "out", "end"))
        begins = {}
        for span in spans:
            slot = slots[span.action.stage, span.action.microbatch]
            x, width = _LEFT + _PX * span.start_ms, _PX * (span.end_ms - span.start_ms)
            parts.append(_rect("action", x, y, width, _BOX, slot))
            parts.append(_text(x + width / 2, y + 17, str(span.action)[1:], "", "middle"))
            begin = begins.setdefault(span.action.microbatch, x)
            if span.action.op.ends_lifetime:
                lane = y + _BOX + 4 + _LANE * slot
                parts.append(_rect("slot", begin, lane, x + width - begin, _LANE - 3, slot))
                label = f"slot {slot}: {span.action.microbatch}"
                if x + width - begin > 150:
                    label = label.replace(": ", ": microbatch ")
                parts.append(_text(begin + 5, lane + 11, label, "small", "start"))
        y += _BOX + 4 + _LANE * (1 + max(slots[stage, m] for stage, m in slots if stage == rank))
        y += _GAP
    width, height = round(_LEFT + _PX * simulation.makespan_ms) + 16, y + 22
    release = next(s.end_ms for s in simulation.spans[0] if s.action.op.ends_lifetime)
    parts += [
        *_note(0, "microbatch 0 takes slot 0,"),
        *_note(release, "and gives it back; microbatch 3 takes it"),
        _text(_LEFT, 20, "F: forward, B: backward. The colour is the slot.", "out", "start"),
        _text(
            _LEFT,
            y + 10,
            "Rank 0 captures 3 slots, once. They replay for these 6 microbatches, or for 6,000.",
            "out",
            "start",
        ),
    ]
    size = f"width='{width}' height='{height}'"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} viewBox='0 0 {width} {height}'>",
            "<title>Microbatches take slots and give them back</title>",
            _STYLE,
            f"<rect class='back' {size} fill='white'/>",
            *parts,
            "</svg>\n",
        ]
    )


def _note(time: float, text: str) -> Iterator[str]:
    x = _LEFT + _PX * time
    yield f"<path d='M{x:g} {_TOP - 22}V{_TOP}' stroke='#888'/>"
    yield _text(x + 4, _TOP - 12, text, "out", "start")


def _rect(kind: str, x: float, y: float, width: float, height: float, slot: int) -> str:
    return (
        f"<rect class='{kind}' x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' "
        f"fill='{_COLOURS[slot]}' stroke='#444' stroke-width='0.7'/>"
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str) -> str:
    style = f"class='{kind}' " if kind else ""
    return f"<text {style}x='{x:g}' y='{y:g}' text-anchor='{anchor}'>{text}</text>"


def draw_schedule(path: Path) -> None:
    """Draw an interleaved schedule with its slots."""
    sizes = ["--pp", "2", "--vpp", "2", "--num-microbatches", "4"]
    command = [sys.executable, "-m", "chunkgraph.cli", "plan", *sizes, "--svg", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def write_schedules(folder: Path) -> None:
    """Write each named schedule as a CSV file and as a picture, with four ranks."""
    from chunkgraph.schedules import (
        CostModel,
        build_schedule,
        draw_svg,
        get_family,
        list_schedules,
        simulate,
    )
    from chunkgraph.slots import assign_slots

    for name in list_schedules():
        num_chunks = get_family(name).num_chunks or 2
        schedule = build_schedule(name, num_ranks=4, num_chunks=num_chunks, num_microbatches=8)
        # Times count in forwards of all layers of a rank.
        simulation = simulate(schedule, CostModel().scaled(1 / num_chunks))
        picture = draw_svg(simulation, slots=assign_slots(schedule))
        (folder / f"{name}.csv").write_text(schedule.to_csv(), encoding="utf-8")
        (folder / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    write_figures(ROOT / "README.md")
    (DOCS / "slot.svg").write_text(slot_picture(), encoding="utf-8")
    draw_schedule(DOCS / "schedule.svg")
    write_schedules(ROOT / "schedules")

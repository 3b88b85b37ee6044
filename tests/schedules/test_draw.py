from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

from chunkgraph.schedules import CostModel, build_schedule, draw_svg, simulate, text_panels
from chunkgraph.schedules.draw_text import legend
from chunkgraph.slots import assign_slots

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    build_schedule("interleaved", num_ranks=4, num_chunks=2, num_microbatches=12),
    build_schedule("zb-h1", num_ranks=3, num_microbatches=11),
    build_schedule("1f1b", num_ranks=12, num_microbatches=3),
    build_schedule("gpipe", num_ranks=1, num_microbatches=1),
    build_schedule("interleaved-zb", num_ranks=2, num_chunks=2, num_microbatches=4),
    build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=5),
    build_schedule("dualpipe-v", num_ranks=3, num_chunks=2, num_microbatches=7),
]


def draw_text(simulation, **options):
    """Return the panels as lines."""
    lines = []
    for panel in text_panels(simulation, **options):
        lines.append(f"time {panel.start_ms:g} to {panel.end_ms:g}")
        for rank, cells in panel.rows:
            lines.append(f"rank {rank} |{''.join(cell.text for cell in cells)}".rstrip())
    return lines


@pytest.fixture(params=CASES, ids=lambda built: built.name)
def built(request):
    return request.param


def test_text_of_a_small_schedule():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    assert draw_text(simulate(built), slots=assign_slots(built)) == [
        "time 0 to 9",
        "rank 0 |F0/0 F1/1           B0/0-----      B1/1-----",
        "rank 1 |     F0/0 B0/0----- F1/0 B1/0-----",
    ]
    words = "F3/0: forward of microbatch 3, slot 0; B: backward"
    assert legend(built) == words


@pytest.mark.parametrize("width", [40, 80, 200])
def test_text_fits_the_width_and_keeps_every_action(built, width):
    text = draw_text(simulate(built), slots=assign_slots(built), width=width)
    assert max(map(len, text)) <= width
    joined = dict.fromkeys(range(built.num_ranks), "")
    for line in text:
        if line.startswith("rank"):
            label, _, body = line.partition("|")
            joined[int(label.split()[1])] += body + " " * (width - len(line))
    for rank, actions in enumerate(built.actions):
        words = joined[rank].replace("-", " ").split()
        shown = [word for word in words if word[0] in "FBIW"]
        assert len(shown) == len(actions)


def rects(root, kind):
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == kind]


def test_svg_holds_every_action_inside_the_picture_without_overlap(built):
    root = ET.fromstring(draw_svg(simulate(built), slots=assign_slots(built)))
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = []
    for rect in (*rects(root, "action"), *rects(root, "slot")):
        x, y = float(rect.get("x")), float(rect.get("y"))
        boxes.append((y, x, x + float(rect.get("width"))))
        assert x >= 0
        assert x + float(rect.get("width")) <= width
        assert y + float(rect.get("height")) <= height
    boxes.sort()
    for (row, _, end), (next_row, start, _) in itertools.pairwise(boxes):
        assert row != next_row or start >= end - 0.11
    # The legend also has one of each.
    num_actions = sum(map(len, built.actions))
    assert len(rects(root, "action")) == num_actions + 1
    large = [text.text for text in root.iter(f"{SVG}text") if text.get("font-size") == "12"]
    assert sorted(large[1:]) == sorted(f"{a.op.value}{a.microbatch}" for _, a in built)


def test_a_bar_joins_the_uses_of_every_slot(built):
    slots, run = assign_slots(built), simulate(built)
    root = ET.fromstring(draw_svg(run, slots=slots))
    assert len(rects(root, "slot")) == len(slots) + 1
    lanes = {rect.get("y") for rect in rects(root, "slot")[1:]}
    keys = {
        (rank, built.chunk_of(span.action.stage), slots[span.action.stage, span.action.microbatch])
        for rank, spans in enumerate(run.spans)
        for span in spans
    }
    assert len(lanes) == len(keys)


def test_svg_names_ranks_title_slots_and_chunks():
    built = CASES[0]
    texts = [
        text.text
        for text in ET.fromstring(draw_svg(simulate(built), slots=assign_slots(built))).iter(
            f"{SVG}text"
        )
    ]
    assert "interleaved: 4 ranks, 2 chunks each, 12 microbatches" in texts
    assert {"rank 0", "rank 3", "c1 s0", "F forward, B backward. White: idle."} <= set(texts)


def test_text_of_measured_costs_keeps_every_label(built):
    """The lengths of these actions are no multiples of each other."""
    costs = CostModel(forward_ms=1.61, backward_ms=4.59, input_grad_ms=2.37, weight_grad_ms=1.43)
    text = draw_text(simulate(built, costs), slots=assign_slots(built), width=100_000)
    for rank, line in enumerate(text[1 : built.num_ranks + 1]):
        body = line.partition("|")[2].replace("-", " ")
        words = [f"{a.op.value}{a.microbatch}" for a in built.actions[rank]]
        assert [word.partition("/")[0].partition(".")[0] for word in body.split()] == words

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from drawn_schedules import CASES

from chunkgraph.schedules import draw_svg, simulate
from chunkgraph.slots import assign_slots

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(params=CASES, ids=lambda built: built.name)
def built(request):
    return request.param


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
    operations = {action.op for _, action in built}
    fills = {rect.get("fill") for rect in rects(root, "action")}
    assert len(fills) == len(operations) * built.num_chunks
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
    assert {"rank 0", "rank 3", "c1 s0", "F forward", "B backward"} <= set(texts)
    assert "I input gradient" not in texts

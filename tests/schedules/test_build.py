"""The order of every schedule, legality, names, CSV."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from drawn_schedules import CASES, SCHEDULES
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError, ScheduleError, TopologyError
from chunkgraph.schedules import (
    Action,
    Op,
    Schedule,
    build_schedule,
    draw_svg,
    get_family,
    list_schedules,
    megatron_schedule,
    simulate,
    validate,
    with_transfers,
)
from chunkgraph.slots import assign_slots


def rows(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.actions]


@settings(deadline=None, max_examples=150)
@given(SCHEDULES)
def test_every_schedule_is_valid_with_and_without_communication(built):
    validate(built)
    with_communication = with_transfers(built)
    validate(with_communication)
    for rank in range(built.num_ranks):
        assert with_communication.compute_actions(rank) == built.actions[rank]


@settings(deadline=None, max_examples=80)
@given(SCHEDULES, st.booleans())
def test_csv_round_trip(built, communicates):
    built = with_transfers(built) if communicates else built
    text = built.to_csv()
    assert len(text.splitlines()) == built.num_ranks
    assert Schedule.from_csv(text, name=built.name) == replace(built, group_size=None)


def test_communication_is_put_around_what_needs_it():
    built = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=1))
    assert rows(built) == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0",
    ]
    assert not build_schedule("gpipe", num_ranks=1, num_microbatches=2).has_communication


def test_csv_names_the_bad_cell_and_skips_bubbles():
    with pytest.raises(ScheduleError, match="schedule 'csv', row 2, cell 2: 'nonsense'"):
        Schedule.from_csv("0F0,0B0\n1F0,nonsense\n")
    with pytest.raises(ScheduleError, match="empty"):
        Schedule.from_csv("\n")
    with pytest.raises(ScheduleError, match="row 2 is empty"):
        Schedule.from_csv("0F0,0B0\n,\n1F0,1B0\n")
    read = Schedule.from_csv("0F0,,,0B0\n,1F0,1B0,\n\n")
    assert rows(read) == ["0F0 0B0", "1F0 1B0"]


def test_csv_of_a_spreadsheet_may_begin_with_a_byte_order_mark():
    assert rows(Schedule.from_csv("\ufeff0F0,0B0\r\n1F0,1B0\r\n")) == ["0F0 0B0", "1F0 1B0"]


def test_csv_of_torch_with_actions_that_overlap():
    read = Schedule.from_csv("0F0, (0F1;0B0)OVERLAP_F_B ,0B1\n")
    assert rows(read) == ["0F0 0F1 0B0 0B1"]
    with pytest.raises(ScheduleError, match="row 1, cell 1: 'x' is not an action"):
        Schedule.from_csv("(0F1;x)OVERLAP_F_B")


def test_unknown_name_lists_and_suggests():
    with pytest.raises(ConfigError, match=r"1f1b, interleaved, gpipe, zb-h1.*'interleaved'"):
        build_schedule("interleave", num_ranks=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 3, None), r"3 .*one group of 4 or more.*nearest legal: 4"),
        ((2, 2, 6, 5), r"6 .*a last group of none or at least 2 .*nearest legal: 5 or 7"),
        ((4, 2, 8, 3), r"group size is 3.*at least the pipeline size 4"),
        ((1, 2, 4, None), r"needs at least 2 pipeline ranks, but num_ranks is 1"),
        ((2, 1, 0, None), r"needs at least 1 .*nearest legal: 1"),
        ((0, 1, 1, None), r"num_ranks is 0"),
        ((2, 0, 1, None), r"num_chunks is 0"),
        ((2**62, 1, 1, None), r"at most 1024 stages"),
        ((2, 513, 2, None), r"at most 1024 stages"),
    ],
)
def test_impossible_topologies_are_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        megatron_schedule(*arguments)


def test_chunks_must_fit_the_schedule():
    with pytest.raises(TopologyError, match="one model chunk on each rank"):
        build_schedule("gpipe", num_ranks=2, num_microbatches=2, num_chunks=2)
    with pytest.raises(TopologyError, match="at least 2 model chunks"):
        build_schedule("interleaved", num_ranks=2, num_microbatches=2)
    with pytest.raises(TopologyError, match="two model chunks on each rank, but num_chunks is 3"):
        build_schedule("zb-v", num_ranks=2, num_microbatches=2, num_chunks=3)
    with pytest.raises(TopologyError, match="at least 2 pipeline ranks"):
        build_schedule("zb-v", num_ranks=1, num_microbatches=2, num_chunks=2)
    with pytest.raises(TopologyError, match=r"7 .*needs 2 for each of the 4 ranks .*legal: 8"):
        build_schedule("dualpipe-v", num_ranks=4, num_microbatches=7, num_chunks=2)


numbers = st.integers(min_value=0, max_value=10**6)
actions = st.builds(Action, st.sampled_from(Op), numbers, numbers)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Op.F, 2, 0)),
        ("0I13", Action(Op.I, 0, 13)),
        ("3SEND_B1", Action(Op.SEND_B, 3, 1)),
        (" 10W7 ", Action(Op.W, 10, 7)),
    ],
)
def test_text_form(text, action):
    assert Action.parse(text) == action
    assert str(action) == text.strip()


@settings(deadline=None)
@given(actions)
def test_text_round_trip(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2X0", "2F-1", "2F0 3F0", "2f0", "2F0.5"])
def test_bad_text_shows_form_and_example(text):
    with pytest.raises(ScheduleError, match=r"<stage><operation><microbatch>.*'2F0'"):
        Action.parse(text)


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


@pytest.mark.parametrize(("name", "is_folded"), [(n, n != "gpipe") for n in list_schedules()])
def test_many_microbatches_are_drawn_as_the_ends_of_their_step(name, is_folded):
    """A longer steady state changes no box, only what the boxes and the axis say."""
    pictures, titles = [], []
    for num_microbatches in (32, 48):
        schedule = build_schedule(
            name,
            num_ranks=4,
            num_chunks=get_family(name).num_chunks or 2,
            num_microbatches=num_microbatches,
        )
        root = ET.fromstring(draw_svg(simulate(schedule), slots=assign_slots(schedule)))
        texts = [text.text for text in root.iter(f"{SVG}text") if text.get("font-size") == "12"]
        assert texts[1] == "F0"
        assert any(text == f"B{num_microbatches - 1}" for text in texts) or "W0" in texts
        boxes = [
            [float(rect.get(key)) for key in ("x", "y", "width")] for rect in rects(root, "action")
        ]
        assert min(width for _, _, width in boxes) > 0
        for (x, y, width), (next_x, next_y, _) in itertools.pairwise(sorted(boxes[1:], key=_place)):
            assert y != next_y or next_x >= x + width - 0.11
        pictures.append((boxes, len(rects(root, "slot")), root.get("width")))
        titles.append(next(root.iter(f"{SVG}title")).text)
    assert (pictures[0] == pictures[1]) is is_folded
    left_out = [re.findall(r", (\d+) of them left out at the dashed lines", one) for one in titles]
    assert [len(found) for found in left_out] == [is_folded] * 2
    if is_folded:
        assert int(left_out[1][0]) - int(left_out[0][0]) == 16


def _place(box):
    return box[1], box[0]

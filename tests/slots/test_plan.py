from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import Op, legal_counts, megatron_schedule
from chunkgraph.slots import (
    assign_slots,
    in_flight,
    plan_slots,
)


@pytest.mark.parametrize(
    ("sizes", "rank", "slots"),
    [
        ((8, 4, 8), 0, (16, 16, 8, 8)),
        ((8, 4, 8), 7, (16, 9, 8, 1)),
        ((2, 2), 0, (4, 2)),
        ((2, 2), 1, (3, 1)),
        ((4, 2), 0, (8, 4)),
        ((4, 2), 3, (5, 1)),
        ((8, 4, 16), 0, (32, 31, 16, 15)),
        ((8, 4, 16), 7, (32, 24, 16, 12)),
    ],
)
def test_known_interleaved_plans(sizes, rank, slots):
    plan = plan_slots(*sizes, rank=rank)
    assert plan.slots_per_chunk == slots
    assert plan.num_slots == sum(slots)
    assert plan.num_graphs == 2 * sum(slots)


def test_the_first_stage_has_no_graph_of_an_input_gradient():
    """As captured: `chunkgraph train` reports 4 + 6 graphs for two ranks of two slots."""
    assert [plan_slots(2, rank=r, schedule="zb-h1").num_graphs for r in (0, 1)] == [4, 6]
    assert plan_slots(2, 2, rank=0, schedule="zb-v").num_graphs == 3 * 5 - 4


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
def test_1f1b_needs_one_slot_less_on_each_further_rank(num_ranks):
    plans = [plan_slots(num_ranks, rank=rank) for rank in range(num_ranks)]
    assert [plan.slots_per_chunk for plan in plans] == [(num_ranks - r,) for r in range(num_ranks)]
    assert [plan.peak_in_flight for plan in plans] == [num_ranks - r for r in range(num_ranks)]


@pytest.mark.parametrize(
    ("schedule", "slots", "together"),
    [
        ("interleaved", [(8, 4), (8, 4), (7, 3), (5, 1)], [11, 9, 7, 5]),
        ("interleaved-zb", [(8, 4)] * 4, [8] * 4),
        ("zb-v", [(8, 1), (7, 2), (6, 3), (5, 4)], [8] * 4),
        ("dualpipe-v", [(8, 1), (7, 2), (6, 3), (5, 4)], [9] * 4),
    ],
)
def test_known_plans_of_four_ranks_with_two_chunks(schedule, slots, together):
    """torch's liveness analyser counts the same from its tables."""
    plans = [plan_slots(4, 2, schedule=schedule, rank=rank) for rank in range(4)]
    assert [plan.slots_per_chunk for plan in plans] == slots
    assert [plan.peak_in_flight for plan in plans] == together


def test_no_legal_count_within_the_maximum_is_refused():
    message = "no legal microbatch count up to 7; the smallest is 8"
    with pytest.raises(TopologyError, match=message):
        plan_slots(4, 2, rank=0, schedule="dualpipe-v", max_num_microbatches=7)


def test_gpipe_needs_a_largest_count():
    with pytest.raises(ConfigError, match="max_num_microbatches"):
        plan_slots(4, rank=0, schedule="gpipe")
    plan = plan_slots(4, rank=2, schedule="gpipe", max_num_microbatches=7)
    assert plan.slots_per_chunk == (7,)


def test_a_promise_saves_slots():
    free = plan_slots(8, 4, 8, rank=0)
    capped = plan_slots(8, 4, 8, rank=0, max_num_microbatches=8)
    assert capped.slots_per_chunk == (8, 8, 8, 8)
    assert capped.num_slots < free.num_slots
    assert plan_slots(4, rank=0, max_num_microbatches=2).slots_per_chunk == (2,)
    assert plan_slots(4, rank=0, max_num_microbatches=200) == plan_slots(4, rank=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 2, "rank": 2}, r"rank 2 is outside 0\.\.1"),
        ({"num_ranks": 2, "rank": -1}, r"outside"),
        ({"num_ranks": 1, "num_chunks": 2, "rank": 0}, "at least 2 pipeline ranks"),
        ({"num_ranks": 4, "num_chunks": 2, "group_size": 3, "rank": 0}, "group size is 3"),
        (
            {"num_ranks": 4, "num_chunks": 2, "rank": 0, "max_num_microbatches": 3},
            "no legal microbatch count up to 3; the smallest is 4",
        ),
    ],
)
def test_bad_plans_are_refused(arguments, message):
    with pytest.raises(TopologyError, match=message):
        plan_slots(**arguments)


@st.composite
def topologies(draw):
    num_ranks, num_chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if num_ranks == 1:
        num_chunks = 1
    group_size = draw(st.integers(num_ranks, 3 * num_ranks)) if num_chunks > 1 else None
    sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "group_size": group_size}
    counts = legal_counts(**sizes).up_to(7 * (group_size or num_ranks))
    return sizes, draw(st.sampled_from(counts))


@settings(max_examples=60)
@given(topologies())
def test_no_legal_step_exceeds_the_plan(case):
    sizes, count = case
    built = megatron_schedule(**sizes, num_microbatches=count)
    slots = assign_slots(built)
    for rank in range(sizes["num_ranks"]):
        plan = plan_slots(**sizes, rank=rank)
        counts = in_flight(
            built.actions[rank], num_ranks=sizes["num_ranks"], num_chunks=sizes["num_chunks"]
        )
        used = [0] * sizes["num_chunks"]
        for (stage, _), slot in slots.items():
            if built.rank_of(stage) == rank:
                used[built.chunk_of(stage)] = max(used[built.chunk_of(stage)], slot + 1)
        # Lowest-free assignment uses as many slots as microbatches in flight; the plan has them.
        assert tuple(used) == counts.per_chunk
        assert all(a <= b for a, b in zip(counts.per_chunk, plan.slots_per_chunk, strict=True))
        assert counts.together <= plan.peak_in_flight <= plan.num_slots


@given(topologies())
def test_a_slot_holds_one_microbatch_at_a_time(case):
    sizes, count = case
    built = megatron_schedule(**sizes, num_microbatches=count)
    slots = assign_slots(built)
    for rank in range(sizes["num_ranks"]):
        held: set[tuple[int, int]] = set()
        for action in built.compute_actions(rank):
            place = (action.stage, slots[action.stage, action.microbatch])
            if action.op is Op.F:
                assert place not in held
                held.add(place)
            elif action.op.ends_lifetime:
                held.remove(place)
        assert not held

from __future__ import annotations

import pytest

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.slots import (
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

"""Slots of torch's schedules: as many as the order of actions needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _Action

from chunkgraph.errors import ConfigError
from chunkgraph.pipelining.slots import ScheduleSlots, slots_of
from chunkgraph.slots import plan_slots


def slots(name: str, num_ranks: int, num_local: int, count: int) -> ScheduleSlots:
    cls = getattr(pipelining, name)
    num_stages = num_ranks * num_local
    stages = [
        SimpleNamespace(
            num_stages=num_stages, group_size=num_ranks, group_rank=0, stage_index=i, submod=None
        )
        for i in range(num_local)
    ]
    stage_or_stages: Any = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
    return slots_of(cls(stage_or_stages, count, loss_fn=lambda *_: None), num_stages, count)


def of_ranks(plan: ScheduleSlots, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the slots of each rank's stages, with stages assigned to ranks in turn."""
    return [
        tuple(plan.of_stage[i] for i in range(rank, len(plan.of_stage), num_ranks))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("count", [4, 8, 11])
def test_1f1b_is_the_formula_and_gpipe_holds_all(num_ranks: int, count: int) -> None:
    plan = slots("Schedule1F1B", num_ranks, 1, count)
    for rank in range(num_ranks):
        ours = plan_slots(num_ranks, rank=rank, schedule="1f1b", max_num_microbatches=count)
        assert (plan.of_stage[rank],) == ours.slots_per_chunk
    assert not plan.is_split
    gpipe = slots("ScheduleGPipe", num_ranks, 1, count)
    assert set(gpipe.of_stage.values()) == set(gpipe.of_rank.values()) == {count}


def test_interleaved_needs_more_where_the_count_is_no_multiple_of_the_ranks() -> None:
    plan = slots("ScheduleInterleaved1F1B", 4, 2, 8)
    assert of_ranks(plan, 4) == [(8, 4), (8, 4), (7, 3), (5, 1)]
    assert [plan.of_rank[r] for r in range(4)] == [11, 9, 7, 5]
    other = slots("ScheduleInterleaved1F1B", 4, 2, 10)
    assert of_ranks(other, 4) == [(10, 5), (10, 5), (8, 3), (6, 1)]
    both = plan | other
    assert both == plan | other | plan
    assert of_ranks(both, 4) == [(10, 5), (10, 5), (8, 3), (6, 1)]


@pytest.mark.parametrize("count", [8, 12])
def test_split_backwards_hold_slots_to_their_weight_gradients(count: int) -> None:
    plan = slots("ScheduleInterleavedZeroBubble", 4, 1, count)
    assert plan.is_split
    assert set(plan.of_stage.values()) == {4}
    two = slots("ScheduleInterleavedZeroBubble", 4, 2, count)
    assert of_ranks(two, 4) == [(8, 4)] * 4
    assert set(two.of_rank.values()) == {8}


@pytest.mark.parametrize(
    ("name", "together"), [("ScheduleZBVZeroBubble", 8), ("ScheduleDualPipeV", 9)]
)
def test_v_shaped_schedules(name: str, together: int) -> None:
    plan = slots(name, 4, 2, 12)
    assert plan.is_split
    assert [plan.of_stage[i] for i in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert set(plan.of_rank.values()) == {together}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0F0 0F1 0I0 0I1 0W1 0W0", "weight gradient of microbatch 1 .*that of microbatch 0 comes"),
        ("0F0 0F1 0I0 0B1 0W0", "weight gradient of microbatch 1 .*that of microbatch 0 comes"),
        ("0F0 0W0 0I0", "weight gradient of microbatch 0 .*it has no input gradient"),
        ("0F0 0I0 0W0 0W0", "weight gradient of microbatch 0 .*it has no input gradient"),
    ],
)
def test_weight_gradients_out_of_order_are_refused_before_a_step(row: str, problem: str) -> None:
    actions = [_Action.from_str(text) for text in row.split()]
    with pytest.raises(ConfigError, match=problem):
        slots_of(SimpleNamespace(pipeline_order={0: actions}), 1, 2)


@pytest.mark.parametrize("row", ["0F0 0F1 0I0 0I1 0W0 0W1", "0F0 0F1 0I0 0W0 0B1"])
def test_weight_gradients_in_order_are_planned(row: str) -> None:
    actions = [_Action.from_str(text) for text in row.split()]
    plan = slots_of(SimpleNamespace(pipeline_order={0: actions}), 1, 2)
    assert plan.is_split
    assert plan.of_stage == {0: 2}

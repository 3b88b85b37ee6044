from __future__ import annotations

import pytest

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules import (
    CostModel,
    build_schedule,
    megatron_schedule,
    simulate,
)


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 8), (4, 8), (8, 32)])
def test_split_backwards_of_equal_thirds_leave_one_chunks_forward_per_rank(num_ranks, count):
    """Qi et al. 2023: a V idles (p - 1) F of its chunks, where 1F1B idles (p - 1)(F + B)."""
    costs = CostModel(forward_ms=0.5, backward_ms=1.0, input_grad_ms=0.5, weight_grad_ms=0.5)
    for name in ("interleaved-zb", "zb-v", "dualpipe-v"):
        built = build_schedule(name, num_ranks=num_ranks, num_chunks=2, num_microbatches=count)
        assert simulate(built, costs).makespan_ms == 3.0 * count + 0.5 * (num_ranks - 1)


def test_sending_takes_time_between_ranks_only():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
    run = simulate(built, CostModel(send_ms=0.25))
    assert [(span.start_ms, span.end_ms) for span in run.spans[1]] == [(1.25, 2.25), (2.25, 4.25)]
    assert run.spans[0][1].start_ms == 4.5
    alone = build_schedule("1f1b", num_ranks=1, num_microbatches=3)
    assert simulate(alone, CostModel(send_ms=9.0)).makespan_ms == 9.0


@pytest.mark.parametrize("costs", [{"forward_ms": 0}, {"backward_ms": -1.0}, {"send_ms": -0.1}])
def test_costs_must_make_sense(costs):
    with pytest.raises(ScheduleError):
        CostModel(**costs)


def test_costs_by_stage():
    built = megatron_schedule(2, 1, 3)
    costs = {
        0: CostModel(forward_ms=1.0, backward_ms=2.0),
        1: CostModel(forward_ms=3.0, backward_ms=4.0),
    }
    # The last rank is never idle between its first forward and last backward: 1 + 3 * 7 + 2.
    assert simulate(built, costs).makespan_ms == 24.0
    equal = CostModel(forward_ms=1.5, backward_ms=2.5, send_ms=0.5)
    assert simulate(built, {0: equal, 1: equal}).spans == simulate(built, equal).spans

"""The oracle: replay equals eager to the last bit, in the same process, from the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import counting

from chunkgraph.graphs import GraphBackend
from chunkgraph.schedules import legal_counts, megatron_schedule
from chunkgraph.slots import plan_slots


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, int, list[int], int]:
    num_ranks = draw(st.integers(1, 4))
    num_chunks = draw(st.integers(1, 3)) if num_ranks > 1 else 1
    group = num_ranks * draw(st.integers(1, 2)) if num_chunks > 1 else num_ranks
    legal = legal_counts(
        num_ranks=num_ranks, num_chunks=num_chunks, group_size=group if num_chunks > 1 else None
    ).up_to(3 * group)
    counts = draw(st.lists(st.sampled_from(legal), min_size=2, max_size=4))
    return num_ranks, num_chunks, group, counts, draw(st.integers(0, 1000))


def schedules_of(num_ranks: int, num_chunks: int, group: int, counts: list[int]) -> list[Any]:
    return [
        megatron_schedule(num_ranks, num_chunks, m, group if num_chunks > 1 else None)
        for m in counts
    ]


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    run=runs(),
    main_grad=st.booleans(),
    shared=st.booleans(),
)
def test_random_schedules_and_counts_equal_eager(
    make_pipeline: Callable[..., Any],
    new_backend: Callable[[], GraphBackend],
    run: tuple[int, int, int, list[int], int],
    main_grad: bool,
    shared: bool,
) -> None:
    num_ranks, num_chunks, group, counts, seed = run
    schedules = schedules_of(num_ranks, num_chunks, group, counts)
    eager = make_pipeline(num_ranks, num_chunks, main_grad=main_grad)
    graphed = make_pipeline(num_ranks, num_chunks, main_grad=main_grad)
    sizes = num_ranks, num_chunks, group if num_chunks > 1 else None
    plans = [plan_slots(*sizes, rank=rank) for rank in range(num_ranks)]
    slots = [(p.peak_in_flight,) * num_chunks if shared else p.slots_per_chunk for p in plans]
    graphed.attach(slots, new_backend(), verify="poison", shared_slots=shared)
    assert graphed.train(schedules, seed).equals(eager.train(schedules, seed))
    for graphs, num_slots in zip(graphed.graphs, slots, strict=True):
        assert graphs.counters.captures == sum(num_slots)
        assert graphs.counters.capture_sessions == 1
        assert graphs.counters.replays == num_chunks * sum(counts[1:])
        assert dict(graphs.counters.fallbacks) == {"capture warmup": 1}


@pytest.mark.parametrize("counts", [[1, 2, 3, 4, 9, 3, 2, 1], [8, 1, 8], [2, 2, 2]])
def test_counts_below_at_and_above_the_slots_capture_once(
    make_pipeline: Callable[..., Any], backend: GraphBackend, counts: list[int]
) -> None:
    schedules = schedules_of(3, 1, 3, counts)
    eager, graphed = make_pipeline(3), make_pipeline(3)
    graphed.attach([(3,), (2,), (1,)], backend)
    first = graphed.train(schedules[:2], seed=1)
    assert first.equals(eager.train(schedules[:2], seed=1))
    pools = [pool for graphs in graphed.graphs for pool in graphs._captured.pools.pools]
    before = [pool.reserved() for pool in pools]
    with (
        counting(graphed.graphs[0].counters, captures=0, capture_sessions=0),
        counting(graphed.graphs[2].counters, captures=0, replays=sum(counts)),
    ):
        assert graphed.train(schedules, seed=2).equals(eager.train(schedules, seed=2))
    assert all(g.counters.fallbacks == {"capture warmup": 1} for g in graphed.graphs)
    assert [pool.reserved() for pool in pools] == before

"""Transfers are posted in an order in which every pair of ranks agrees."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.schedules import (
    Action,
    CostModel,
    Op,
    Schedule,
    build_schedule,
    validate,
    with_transfers,
)

_SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}

costs = st.builds(
    CostModel,
    forward_ms=st.sampled_from([0.5, 1.0, 3.0]),
    backward_ms=st.sampled_from([1.0, 2.0, 7.0]),
    input_grad_ms=st.sampled_from([0.5, 1.0, 2.0]),
    weight_grad_ms=st.sampled_from([0.25, 1.0, 4.0]),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["1f1b", "interleaved", "gpipe", "zb-h1"]))
    num_ranks = draw(st.integers(2, 5))
    num_chunks = draw(st.integers(2, 3)) if name == "interleaved" else 1
    group = draw(st.integers(1, 3)) * num_ranks if name == "interleaved" else 1
    return build_schedule(name, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=group)


def _posted(schedule: Schedule) -> dict[frozenset[int], dict[int, list[Action]]]:
    """Return for each pair of ranks what each of the two posts, as sends."""
    posted: dict[frozenset[int], dict[int, list[Action]]] = defaultdict(lambda: defaultdict(list))
    for rank, action in schedule:
        if not action.op.is_communication:
            continue
        for send, (receive, step) in _SENDS.items():
            if action.op is send:
                peer, message = schedule.rank_of(action.stage + step), action
            elif action.op is receive:
                peer = schedule.rank_of(action.stage - step)
                message = Action(send, action.stage - step, action.microbatch)
            else:
                continue
            posted[frozenset((rank, peer))][rank].append(message)
    return posted


def _blocking_run_ends(schedule: Schedule) -> bool:
    """Run with transports that exchange one message of a pair at a time."""
    queues = {pair: dict(of_rank) for pair, of_rank in _posted(schedule).items()}
    position, num_done = [0] * schedule.num_ranks, defaultdict(int)
    posted_by: dict[tuple[frozenset[int], int], int] = defaultdict(int)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row):
                action = row[position[rank]]
                if action.op.is_communication:
                    step = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
                    pair = frozenset((rank, schedule.rank_of(action.stage + step)))
                    posted_by[pair, rank] += 1
                    num_done[pair] = min(posted_by[pair, r] for r in pair)
                elif not _has_input(schedule, rank, action, queues, num_done):
                    break
                position[rank] += 1
                is_moving = True
    return all(at == len(row) for at, row in zip(position, schedule.actions, strict=True))


def _has_input(
    schedule: Schedule,
    rank: int,
    action: Action,
    queues: dict[frozenset[int], dict[int, list[Action]]],
    num_done: dict[frozenset[int], int],
) -> bool:
    if action.op is Op.W:
        return True
    send, step = (Op.SEND_F, -1) if action.op is Op.F else (Op.SEND_B, 1)
    stage = action.stage + step
    if not 0 <= stage < schedule.num_stages:
        return True
    pair = frozenset((rank, schedule.rank_of(stage)))
    return queues[pair][rank].index(Action(send, stage, action.microbatch)) < num_done[pair]


@given(schedules(), costs)
def test_both_ranks_of_a_pair_post_the_same_messages_in_order(
    schedule: Schedule, cost: CostModel
) -> None:
    ordered = with_transfers(schedule, cost)
    validate(ordered)
    for rank in range(schedule.num_ranks):
        assert ordered.compute_actions(rank) == schedule.compute_actions(rank)
    for of_rank in _posted(ordered).values():
        first, second = of_rank.values()
        assert first == second
    assert _blocking_run_ends(ordered)


def test_a_receive_is_posted_before_the_work_that_hides_it() -> None:
    schedule = with_transfers(build_schedule("zb-h1", num_ranks=2, num_microbatches=4))
    row = [str(action) for action in schedule.actions[1]]
    assert row.index("1RECV_F1") < row.index("1F0")


def test_one_rank_transfers_nothing() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=3)
    assert with_transfers(schedule) == schedule


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_transfers_are_replaced(name: str) -> None:
    schedule = build_schedule(name, num_ranks=3, num_microbatches=5)
    assert with_transfers(schedule.with_communication()) == with_transfers(schedule)

"""Every pair of ranks posts its transfers in the same order."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.schedules import (
    Action,
    Op,
    Schedule,
    build_schedule,
    num_ended_sends,
    validate,
    with_transfers,
)

_SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["1f1b", "interleaved", "gpipe", "zb-h1", "interleaved-zb"]))
    num_ranks = draw(st.integers(2, 5))
    num_chunks = draw(st.integers(2, 3)) if name.startswith("interleaved") else 1
    group = draw(st.integers(1, 3)) * num_ranks if name.startswith("interleaved") else 1
    return build_schedule(name, num_ranks=num_ranks, num_chunks=num_chunks, num_microbatches=group)


def _posted(schedule: Schedule) -> dict[tuple[int, int, Op], dict[int, list[Action]]]:
    """Return the posts of both ranks for each sender, receiver and direction, as sends."""
    posted: dict[tuple[int, int, Op], dict[int, list[Action]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, action in schedule:
        for send, (receive, step) in _SENDS.items():
            if action.op is send:
                target = schedule.rank_of(action.stage + step)
                posted[rank, target, send][rank].append(action)
            elif action.op is receive:
                source = schedule.rank_of(action.stage - step)
                message = Action(send, action.stage - step, action.microbatch)
                posted[source, rank, send][rank].append(message)
    return posted


def _run(schedule: Schedule) -> bool:
    """Run all ranks; a receive waits for its send, a rank for sends that must have ended.

    Return whether all actions run. A send ends when it is received.
    """
    known = [num_ended_sends(schedule, rank) for rank in range(schedule.num_ranks)]
    position = [0] * schedule.num_ranks
    sent, received = set[Action](), set[Action]()
    sends: dict[tuple[int, Op], list[Action]] = defaultdict(list)

    def can_run(rank: int, action: Action) -> bool:
        for send, (receive, step) in _SENDS.items():
            if action.op is receive:
                message = Action(send, action.stage - step, action.microbatch)
                received.update({message} & sent)
                return message in sent
        if action.op in _SENDS or action.op is Op.W:
            return True
        is_forward = action.op is Op.F
        num_ended = known[rank].get((is_forward, action.stage, action.microbatch), 0)
        of_rank = sends[rank, Op.SEND_B if is_forward else Op.SEND_F]
        return received.issuperset(of_rank[:num_ended]) and num_ended <= len(of_rank)

    is_moving = True
    while is_moving:
        is_moving = False
        for rank, row in enumerate(schedule.actions):
            while position[rank] < len(row) and can_run(rank, row[position[rank]]):
                action = row[position[rank]]
                if action.op in _SENDS:
                    sent.add(action)
                    sends[rank, action.op].append(action)
                position[rank] += 1
                is_moving = True
    return all(at == len(row) for at, row in zip(position, schedule.actions, strict=True))


@given(schedules())
def test_what_is_sent_in_one_direction_is_received_in_its_order(schedule: Schedule) -> None:
    ordered = with_transfers(schedule)
    validate(ordered)
    for rank in range(schedule.num_ranks):
        assert ordered.compute_actions(rank) == schedule.compute_actions(rank)
    for (sender, receiver, _), of_rank in _posted(ordered).items():
        assert of_rank[sender] == of_rank[receiver]
    assert _run(ordered)


def test_a_receive_is_posted_where_its_tensor_is_used() -> None:
    schedule = with_transfers(build_schedule("zb-h1", num_ranks=2, num_microbatches=4))
    row = [str(action) for action in schedule.actions[1]]
    assert row.index("1RECV_F1") == row.index("1F1") - 1


def test_a_gradient_acknowledges_the_outputs_received_before_it() -> None:
    schedule = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=3))
    assert num_ended_sends(schedule, 0) == {(False, 0, 0): 1, (False, 0, 1): 2, (False, 0, 2): 3}
    assert num_ended_sends(schedule, 1)[True, 1, 2] == 1

"""Where transfers are posted, and what they tell of sends."""

from __future__ import annotations

from collections import defaultdict

from drawn_schedules import SCHEDULES
from hypothesis import given

from chunkgraph.schedules import (
    Action,
    Op,
    Schedule,
    build_schedule,
    num_ended_sends,
    with_transfers,
)

_SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


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


@given(SCHEDULES)
def test_sends_that_must_have_ended_are_received_by_then(schedule: Schedule) -> None:
    assert _run(with_transfers(schedule))


def test_a_receive_is_posted_where_its_tensor_is_used() -> None:
    schedule = with_transfers(build_schedule("zb-h1", num_ranks=2, num_microbatches=4))
    row = [str(action) for action in schedule.actions[1]]
    assert row.index("1RECV_F1") == row.index("1F1") - 1


def test_a_gradient_acknowledges_the_outputs_received_before_it() -> None:
    schedule = with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=3))
    assert num_ended_sends(schedule, 0) == {(False, 0, 0): 1, (False, 0, 1): 2, (False, 0, 2): 3}
    assert num_ended_sends(schedule, 1)[True, 1, 2] == 1

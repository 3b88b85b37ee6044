"""Place the sends and receives of a schedule."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.schedule import Schedule

_Link = tuple[int, int, Op]
"""Sender, receiver and the operation of the receives."""


def with_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with sends and receives.

    A send follows the action that produces its tensor. A receive precedes the action that uses its
    tensor. What a rank sends to another in one direction, forward or backward, is received in the
    order in which it is sent: if the tensor was not sent first, the receives of those before it
    come first. Stages of one rank exchange tensors without a transfer. Existing sends and receives
    are replaced.

    Ranks that run these actions in order cannot deadlock if a send waits for no transfer but those
    of its own sender, receiver and direction.

    Args:
        schedule: a valid schedule.
    """
    actions = [schedule.compute_actions(rank) for rank in range(schedule.num_ranks)]
    links: defaultdict[_Link, deque[Action]] = defaultdict(deque)
    for row in actions:
        for receive in (_sent_by(schedule, action) for action in row):
            if receive is not None:
                links[_link_of(schedule, receive)].append(receive)
    return replace(schedule, actions=tuple(tuple(_row(schedule, row, links)) for row in actions))


def num_ended_sends(schedule: Schedule, rank: int) -> dict[tuple[bool, int, int], int]:
    """Return, for each tensor that a rank receives, the number of its sends that have ended.

    They are the sends, in the other direction, that the other rank received before it sent the
    tensor. So the rank can wait for them without a deadlock.

    Args:
        schedule: A schedule with transfers.
        rank: The rank.

    Returns:
        Keys are whether the tensor is an input, its stage on this rank and its microbatch.
    """
    counts: dict[tuple[bool, int, int], int] = {}
    for row in schedule.actions:
        num_received = {Op.RECV_F: 0, Op.RECV_B: 0}
        for action in row:
            if action.op in num_received:
                source = action.stage + (-1 if action.op is Op.RECV_F else 1)
                num_received[action.op] += schedule.rank_of(source) == rank
            elif action.op is Op.SEND_F and schedule.rank_of(action.stage + 1) == rank:
                counts[True, action.stage + 1, action.microbatch] = num_received[Op.RECV_B]
            elif action.op is Op.SEND_B and schedule.rank_of(action.stage - 1) == rank:
                counts[False, action.stage - 1, action.microbatch] = num_received[Op.RECV_F]
    return counts


def _row(
    schedule: Schedule, actions: tuple[Action, ...], links: dict[_Link, deque[Action]]
) -> list[Action]:
    row: list[Action] = []
    received: set[Action] = set()
    for action in actions:
        needed = _received_for(schedule, action)
        while needed is not None and needed not in received:
            row.append(links[_link_of(schedule, needed)].popleft())
            received.add(row[-1])
        row.append(action)
        if _sent_by(schedule, action) is not None:
            op = Op.SEND_F if action.op is Op.F else Op.SEND_B
            row.append(Action(op, action.stage, action.microbatch))
    return row


def _received_for(schedule: Schedule, action: Action) -> Action | None:
    """Return the receive of the tensor that an action uses; None if this rank has it."""
    op, source = (Op.RECV_F, -1) if action.op is Op.F else (Op.RECV_B, 1)
    if action.op is Op.W or not schedule.has_messages(action.stage, action.stage + source):
        return None
    return Action(op, action.stage, action.microbatch)


def _sent_by(schedule: Schedule, action: Action) -> Action | None:
    """Return the receive of the tensor that an action produces; None if no other rank uses it."""
    op, target = (Op.RECV_F, 1) if action.op is Op.F else (Op.RECV_B, -1)
    if action.op is Op.W or not schedule.has_messages(action.stage, action.stage + target):
        return None
    return Action(op, action.stage + target, action.microbatch)


def _link_of(schedule: Schedule, receive: Action) -> _Link:
    source = receive.stage + (1 if receive.op is Op.RECV_B else -1)
    return schedule.rank_of(source), schedule.rank_of(receive.stage), receive.op

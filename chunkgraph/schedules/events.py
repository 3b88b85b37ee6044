"""The events that an action waits for, and the event that it causes.

An event is ``(kind, stage, microbatch)``. B and I cause the same event, "input grad", so each stage
may split its backward independently of the others.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.schedule import Schedule

Event = tuple[str, int, int]

_EVENT_OF_OP = {
    Op.F: "output",
    Op.B: "input grad",
    Op.I: "input grad",
    Op.W: "weight grad",
    Op.SEND_F: "output sent",
    Op.SEND_B: "input grad sent",
    Op.RECV_F: "input received",
    Op.RECV_B: "output grad received",
}


def event_of(action: Action) -> Event:
    """Return the event that an action causes."""
    return (_EVENT_OF_OP[action.op], action.stage, action.microbatch)


def needs_of(
    schedule: Schedule, *, has_communication: bool
) -> Callable[[Action], tuple[Event, ...]]:
    """Return a function that returns the events that must happen before an action can run.

    Args:
        schedule: the schedule, for the number and ranks of its stages.
        has_communication: whether tensors cross ranks by SEND and RECV actions, or implicitly.
    """

    @functools.cache
    def of(op: Op, stage: int) -> tuple[tuple[str, int], ...]:
        return _needs(op, stage, schedule, has_communication)

    def needs(action: Action) -> tuple[Event, ...]:
        events = of(action.op, action.stage)
        return tuple([(kind, stage, action.microbatch) for kind, stage in events])

    return needs


def _needs(
    op: Op, stage: int, schedule: Schedule, has_communication: bool
) -> tuple[tuple[str, int], ...]:
    """Return kind and stage of the events that an operation of a stage needs."""
    is_first, is_last = stage == 0, stage == schedule.num_stages - 1
    output = ("output", stage)
    input_grad = ("input grad", stage)
    match op:
        case Op.F if is_first:
            return ()
        case Op.F if has_communication and schedule.has_messages(stage, stage - 1):
            return (("input received", stage),)
        case Op.F:
            return (("output", stage - 1),)
        case Op.B | Op.I if is_last:
            return (output,)
        case Op.B | Op.I if has_communication and schedule.has_messages(stage, stage + 1):
            return (output, ("output grad received", stage))
        case Op.B | Op.I:
            return (output, ("input grad", stage + 1))
        case Op.W:
            return (input_grad,)
        case Op.SEND_F:
            return (output,)
        case Op.SEND_B:
            return (input_grad,)
        case Op.RECV_F:
            return (("output sent", stage - 1),)
        case _:
            return (("input grad sent", stage + 1),)


def run_in_order(
    rows: Sequence[Sequence[Action]], needs: Callable[[Action], tuple[Event, ...]]
) -> Iterator[tuple[int, int, tuple[Event, ...]]]:
    """Yield every action that can run, after all actions that it needs, until none is left.

    Args:
        rows: Actions of each rank; a rank runs them in this order.
        needs: Returns the events that must happen before an action.

    Yields:
        Rank, position among the rank's actions, and events that the action needs.
    """
    done: set[Event] = set()
    waiting: dict[Event, list[int]] = {}  # ranks by the event that they wait for
    positions = [0] * len(rows)
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        for position in range(positions[rank], len(rows[rank])):
            action = rows[rank][position]
            events = needs(action)
            if not done.issuperset(events):
                missing = next(event for event in events if event not in done)
                waiting.setdefault(missing, []).append(rank)
                positions[rank] = position
                break
            yield rank, position, events
            event = event_of(action)
            done.add(event)
            ready.extend(waiting.pop(event, ()))

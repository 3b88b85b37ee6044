"""The events that an action waits for, and the event that it causes.

An event is ``(kind, stage, microbatch)``. B and I cause the same event, "input grad", so each stage
may split its backward independently of the others.
"""

from __future__ import annotations

from .action import Action, Op
from .schedule import Schedule

__all__ = ["Event", "event_of", "events_needed"]

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


def events_needed(
    action: Action, schedule: Schedule, *, has_communication: bool
) -> tuple[Event, ...]:
    """Return the events that must happen before an action can run.

    Args:
        action: an action of the schedule.
        schedule: the schedule, for the number and ranks of its stages.
        has_communication: whether tensors cross ranks by SEND and RECV actions, or implicitly.
    """
    stage, microbatch = action.stage, action.microbatch
    is_first, is_last = stage == 0, stage == schedule.num_stages - 1
    output = ("output", stage, microbatch)
    input_grad = ("input grad", stage, microbatch)
    match action.op:
        case Op.F if is_first:
            return ()
        case Op.F if has_communication and schedule.has_messages(stage, stage - 1):
            return (("input received", stage, microbatch),)
        case Op.F:
            return (("output", stage - 1, microbatch),)
        case Op.B | Op.I if is_last:
            return (output,)
        case Op.B | Op.I if has_communication and schedule.has_messages(stage, stage + 1):
            return (output, ("output grad received", stage, microbatch))
        case Op.B | Op.I:
            return (output, ("input grad", stage + 1, microbatch))
        case Op.W:
            return (input_grad,)
        case Op.SEND_F:
            return (output,)
        case Op.SEND_B:
            return (input_grad,)
        case Op.RECV_F:
            return (("output sent", stage - 1, microbatch),)
        case _:
            return (("input grad sent", stage + 1, microbatch),)

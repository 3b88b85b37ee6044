"""What an action waits for and what it makes available.

An event is ``(what, stage, microbatch)``. B and I make the same event, "the gradient of the stage's
input exists", so that stages may split their backward or not, independently of each other.
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
    """The event an action makes happen."""
    return (_EVENT_OF_OP[action.op], action.stage, action.microbatch)


def events_needed(
    action: Action, schedule: Schedule, *, has_communication: bool
) -> tuple[Event, ...]:
    """The events that must have happened before an action can run.

    Args:
        action: An action of the schedule.
        schedule: Gives the number of stages and where they are.
        has_communication: Tensors cross ranks by SEND and RECV actions, rather than by themselves.
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

"""Write the text of a SlotError: the refused call, the slots in use, and the step so far."""

from __future__ import annotations

from collections.abc import Sequence

from chunkgraph.schedules import Schedule

__all__ = ["Event", "describe_misuse"]

Event = tuple[str, int, int, int]
"""One accepted call: name, chunk, microbatch, slot."""

_NUM_SHOWN = 12


def describe_misuse(
    *,
    label: str,
    call: tuple[str, int | None, int | None, int | None],
    problem: str,
    advice: str,
    busy: Sequence[tuple[int, int, int, str]],
    events: Sequence[Event],
    schedule: Schedule | None,
    rank: int,
) -> str:
    """Compose the message.

    Args:
        label: Owner of the slots.
        call: The refused call: name, chunk, microbatch, slot; None for values it does not have.
        problem: The problem, in words.
        advice: The remedy, in words.
        busy: Chunk, slot, microbatch and state of every slot in use.
        events: The accepted calls of this step, in order.
        schedule: The schedule to show the position in, if known.
        rank: Rank in ``schedule``.
    """
    lines = [f"{label}, {_call_text(*call)}: {problem}.", f"What to do: {advice}."]
    if busy:
        lines.append("Slots in use:")
        lines += [
            f"  chunk {chunk} slot {slot}: microbatch {microbatch}, {state}"
            for chunk, slot, microbatch, state in busy
        ]
    else:
        lines.append("No slot is in use.")
    lines.append("This step so far:")
    if len(events) > _NUM_SHOWN:
        lines.append(f"     ... {len(events) - _NUM_SHOWN} earlier")
    lines += [f"     {_call_text(*event)}" for event in events[-_NUM_SHOWN:]]
    lines.append(f"  -> {_call_text(*call)}")
    if schedule is not None and rank < len(schedule.actions):
        lines.append(_place_in_schedule(schedule, rank, events))
    return "\n".join(lines)


def _call_text(what: str, chunk: int | None, microbatch: int | None, slot: int | None) -> str:
    parts = [what]
    parts += [f"chunk {chunk}"] if chunk is not None else []
    parts += [f"microbatch {microbatch}"] if microbatch is not None else []
    parts += [f"slot {slot}"] if slot is not None else []
    return " ".join(parts)


def _place_in_schedule(schedule: Schedule, rank: int, events: Sequence[Event]) -> str:
    """Return the actions of the schedule around the position of the accepted calls."""
    position = sum(what in ("forward", "backward") for what, *_ in events)
    # A release belongs to the backward before it; if that is split, the release is a W.
    actions = [action for action in schedule.compute_actions(rank) if action.op.value != "W"]
    before = " ".join(str(action) for action in actions[max(0, position - 4) : position])
    after = " ".join(str(action) for action in actions[position + 1 : position + 4])
    here = str(actions[position]) if position < len(actions) else "(end)"
    return f"Schedule {schedule.name!r} of this rank: {before} -> {here} <- {after}".rstrip()

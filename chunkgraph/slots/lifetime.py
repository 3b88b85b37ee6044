"""When a microbatch's saved activations are alive on a rank, and how many are at once.

A lifetime starts with the forward F and ends with B, or with W where the backward is split: W still
reads saved activations, so I does not end it. Both ends belong to it (inclusive); what it held is
free for the very next action.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules import Action, InFlight, Op, Schedule, chunk_of

__all__ = ["InFlight", "Lifetime", "assign_slots", "in_flight", "lifetimes"]


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One microbatch of one chunk on one rank.

    Attributes:
        chunk: Index of the model chunk on the rank.
        microbatch: Microbatch number.
        forward: Index of F among the rank's compute actions.
        release: Index of B or W among them, inclusive.
    """

    chunk: int
    microbatch: int
    forward: int
    release: int


def lifetimes(schedule: Schedule, rank: int) -> tuple[Lifetime, ...]:
    """Lifetimes of every (chunk, microbatch) of a rank, in the order of their forwards.

    Raises:
        ScheduleError: A forward is never released.
    """
    actions = schedule.compute_actions(rank)
    released = {
        (action.stage, action.microbatch): position
        for position, action in enumerate(actions)
        if action.op.ends_lifetime
    }
    found = []
    for position, action in enumerate(actions):
        if action.op is not Op.F:
            continue
        release = released.get((action.stage, action.microbatch))
        if release is None:
            raise ScheduleError(
                f"schedule {schedule.name!r}, rank {rank}: {action} has no B or W that would "
                "release it; check the schedule with validate()"
            )
        chunk = schedule.chunk_of(action.stage)
        found.append(Lifetime(chunk, action.microbatch, position, release))
    return tuple(found)


def in_flight(actions: Iterable[Action], *, num_ranks: int, num_chunks: int) -> InFlight:
    """Count what is in flight along the actions of one rank."""
    current, peak = [0] * num_chunks, [0] * num_chunks
    together = peak_together = 0
    for action in actions:
        if action.op is Op.F:
            chunk = chunk_of(action.stage, num_ranks)
            current[chunk] += 1
            peak[chunk] = max(peak[chunk], current[chunk])
            together += 1
            peak_together = max(peak_together, together)
        elif action.op.ends_lifetime:
            current[chunk_of(action.stage, num_ranks)] -= 1
            together -= 1
    return InFlight(tuple(peak), peak_together)


def assign_slots(schedule: Schedule) -> dict[tuple[int, int], int]:
    """The slot of every (stage, microbatch): the lowest free one of its chunk at its forward.

    This is what ``SlotMachine`` hands out when it runs the schedule, and it never uses more slots
    than the chunk has microbatches in flight at once.
    """
    slots: dict[tuple[int, int], int] = {}
    for rank in range(schedule.num_ranks):
        busy: dict[int, set[int]] = {}
        for action in schedule.compute_actions(rank):
            taken = busy.setdefault(action.stage, set())
            if action.op is Op.F:
                slot = next(number for number in range(len(taken) + 1) if number not in taken)
                taken.add(slot)
                slots[action.stage, action.microbatch] = slot
            elif action.op.ends_lifetime:
                taken.discard(slots[action.stage, action.microbatch])
    return slots

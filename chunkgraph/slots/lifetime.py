"""Lifetimes of microbatches' saved activations on a rank, and the number alive at once.

A lifetime starts with the forward F and ends with B, or with W if the backward is split: W still
reads saved activations, so I does not end it. Both ends are inclusive; the next action can reuse
the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from chunkgraph.schedules import Action, InFlight, Op, Schedule, chunk_of

__all__ = ["InFlight", "assign_slots", "in_flight"]


def in_flight(actions: Iterable[Action], *, num_ranks: int, num_chunks: int) -> InFlight:
    """Count the microbatches in flight along the actions of one rank."""
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
    """Return the slot of every (stage, microbatch): the chunk's lowest free one at the forward.

    ``SlotMachine`` assigns the same slots when it runs the schedule. A chunk never uses more slots
    than it has microbatches in flight at once.
    """
    slots: dict[tuple[int, int], int] = {}
    for rank in range(schedule.num_ranks):
        busy: dict[int, set[int]] = {}
        for action in schedule.compute_actions(rank):
            in_use = busy.setdefault(action.stage, set())
            if action.op is Op.F:
                slot = next(number for number in range(len(in_use) + 1) if number not in in_use)
                in_use.add(slot)
                slots[action.stage, action.microbatch] = slot
            elif action.op.ends_lifetime:
                in_use.discard(slots[action.stage, action.microbatch])
    return slots

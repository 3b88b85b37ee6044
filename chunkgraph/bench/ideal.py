"""Simulate the step time of a pipeline in which only kernels take time."""

from __future__ import annotations

from collections.abc import Mapping

from chunkgraph.schedules import Op, Schedule
from chunkgraph.schedules.events import event_of, events_needed

__all__ = ["pipeline_ms"]


def pipeline_ms(
    schedule: Schedule, forward_ms: Mapping[int, float], backward_ms: Mapping[int, float]
) -> float:
    """Return the makespan of a schedule with costs by stage, in ms.

    This is ``chunkgraph.schedules.simulate`` with costs by stage: each rank runs its actions in
    order, each as soon as the rank is free and its inputs exist. Messages, launches and the
    optimizer take no time. For equal stages and 1F1B it is the well-known ``(m + p - 1) (f + b)``.

    Args:
        schedule: schedule of forwards and whole backwards.
        forward_ms: kernel time of one microbatch's forward, by stage.
        backward_ms: kernel time of one microbatch's backward, by stage.
    """
    costs = {Op.F: forward_ms, Op.B: backward_ms}
    rows = [schedule.compute_actions(rank) for rank in range(schedule.num_ranks)]
    next_action, free_ms = [0] * len(rows), [0.0] * len(rows)
    end_ms: dict[tuple[str, int, int], float] = {}
    # In a valid schedule some unfinished rank always has all inputs of its next action.
    while any(done < len(row) for done, row in zip(next_action, rows, strict=True)):
        for rank, row in enumerate(rows):
            for action in row[next_action[rank] :]:
                needed = events_needed(action, schedule, has_communication=False)
                if any(event not in end_ms for event in needed):
                    break
                start = max([free_ms[rank], *(end_ms[event] for event in needed)])
                free_ms[rank] = start + costs[action.op][action.stage]
                end_ms[event_of(action)] = free_ms[rank]
                next_action[rank] += 1
    return max(free_ms)

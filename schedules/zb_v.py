"""ZB-V: two chunks per rank placed as a V, every backward split.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6. Rank 0 holds the first and the last
stage, so the first backwards finish early. If F, I and W take the same time, ranks idle only until
the first microbatch reaches them. Every rank holds at most ``2 * num_ranks`` microbatches of its
half-size chunks: as much memory as 1F1B on rank 0.
"""

from __future__ import annotations

from .action import Action
from .in_flight import InFlight
from .placement import Placement, stage_of
from .shape import PipelineShape
from .steps import actions_of_steps

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order.

    A step with too few microbatches to fill the pipeline is a larger step without the others.
    """
    p, r = shape.num_ranks, rank
    n = max(shape.num_microbatches, 2 * p - 1)
    warmup = ["F0"] * (2 * (p - r) - 1) + ["F1", "F0"] * r + ["F1", "I1", "W1"] * (p - r)
    steady = ["F0", "I0", "W0", "F1", "I1", "W1"] * (n - 2 * p + r + 1)
    drain = ["I0", "W0", "F1", "I1", "W1"] * (p - r - 1)
    cooldown = ["I0", "I1"] * r + ["I0", "W0"] * (p - r) + ["W1"] * r + ["W0"] * r
    stages = [stage_of(rank, chunk, p, Placement.V) for chunk in (0, 1)]
    actions = actions_of_steps(warmup + steady + drain + cooldown, stages)
    return tuple(action for action in actions if action.microbatch < shape.num_microbatches)


def in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    p, n = shape.num_ranks, shape.num_microbatches
    per_chunk = (min(2 * p - rank, n), min(rank + 1, n))
    return InFlight(per_chunk, min(sum(per_chunk), 2 * p))


def idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: one per other rank, more in small steps."""
    num_others = shape.num_ranks - 1
    return max(num_others, 4 * num_others - 2 * (shape.num_microbatches - 1))

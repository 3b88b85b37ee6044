"""DualPipeV: two chunks per rank placed as a V, forwards in pairs with backwards.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.1 (DualPipe), in the V-shaped form
of their repository, which holds the parameters once. DualPipe overlaps a forward with the backward
after it, each hiding the other's communication; here they run one after the other. Most backwards
are whole; weight gradients are split off only where a rank would idle.
"""

from __future__ import annotations

from .action import Action
from .in_flight import InFlight
from .placement import Placement, stage_of
from .shape import PipelineShape
from .steps import actions_of_steps

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order; needs two microbatches per rank or more."""
    p, r, n = shape.num_ranks, rank, shape.num_microbatches
    warmup = ["F0"] * 2 * (p - r - 1) + ["F0", "F1"] * (r + 1) + ["I1", "W", "F1"] * (p - r - 1)
    steady = ["F0", "B1", "F1", "B0"] * (n - 2 * p + r + 1)
    drain = ["B1", "F1", "B0"] * (p - r - 1)
    # Both chunks in turn: r + 1 whole backwards, then r + 1 without weight gradients.
    ops = ["B"] * (r + 1) + ["I"] * (r + 1)
    turns = [f"{op}{chunk}" for op, chunk in zip(ops, [1, 0] * (r + 1), strict=True)]
    cooldown = turns + ["W", "I0"] * (p - r - 1) + ["W"] * (r + 1)
    stages = [stage_of(rank, chunk, p, Placement.V) for chunk in (0, 1)]
    return tuple(actions_of_steps(warmup + steady + drain + cooldown, stages))


def in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, the same in every legal step."""
    per_chunk = (2 * shape.num_ranks - rank, rank + 1)
    return InFlight(per_chunk, sum(per_chunk))


def idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: one forward of each other rank."""
    return shape.num_ranks - 1

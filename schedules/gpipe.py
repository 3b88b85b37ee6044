"""GPipe: all forwards, then all backwards.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
Every microbatch of the step is in flight at once.
"""

from __future__ import annotations

from .action import Action, Op
from .in_flight import InFlight
from .shape import PipelineShape

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order; the shape has one chunk per rank."""
    warmup = [Action(Op.F, rank, i) for i in range(shape.num_microbatches)]
    cooldown = [Action(Op.B, rank, i) for i in range(shape.num_microbatches)]
    return tuple(warmup + cooldown)


def in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    return InFlight((shape.num_microbatches,), shape.num_microbatches)


def idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: a forward and a backward of each other rank."""
    return 3 * (shape.num_ranks - 1)

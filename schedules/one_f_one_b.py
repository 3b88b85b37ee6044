"""1F1B: one forward, one backward, so that rank r holds at most ``num_ranks - r`` microbatches.

Narayanan et al. 2019 (PipeDream), in the flushing form of Megatron-core's schedule without
interleaving. With one rank it is Megatron's schedule without a pipeline: F B F B.
"""

from __future__ import annotations

from .action import Action, Op
from .in_flight import InFlight
from .shape import PipelineShape

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order; the shape has one chunk per rank."""
    num_warmup = min(shape.num_ranks - rank - 1, shape.num_microbatches)
    num_steady = shape.num_microbatches - num_warmup

    warmup = [Action(Op.F, rank, i) for i in range(num_warmup)]
    steady = [
        action
        for i in range(num_steady)
        for action in (Action(Op.F, rank, num_warmup + i), Action(Op.B, rank, i))
    ]
    cooldown = [Action(Op.B, rank, i) for i in range(num_steady, shape.num_microbatches)]
    return tuple(warmup + steady + cooldown)


def in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    most = min(shape.num_ranks - rank, shape.num_microbatches)
    return InFlight((most,), most)


def idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: a forward and a backward of each other rank."""
    return 3 * (shape.num_ranks - 1)

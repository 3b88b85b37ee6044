"""1F1B and GPipe: one chunk per rank, and whole backwards.

1F1B runs one forward, one backward, so that rank r holds at most ``num_ranks - r`` microbatches:
Narayanan et al. 2019 (PipeDream), in the flushing form of Megatron-core's schedule without
interleaving. With one rank it is Megatron's schedule without a pipeline: F B F B.

GPipe runs all forwards, then all backwards, so that every microbatch of the step is in flight at
once: Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism".
"""

from __future__ import annotations

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.shape import InFlight, PipelineShape


def one_f_one_b_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order."""
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


def one_f_one_b_in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    most = min(shape.num_ranks - rank, shape.num_microbatches)
    return InFlight((most,), most)


def gpipe_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order."""
    return tuple(Action(op, rank, i) for op in (Op.F, Op.B) for i in range(shape.num_microbatches))


def gpipe_in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    return InFlight((shape.num_microbatches,), shape.num_microbatches)

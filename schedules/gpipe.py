"""GPipe: all forwards, then all backwards.

Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism".
Every microbatch of the step is in flight at once.
"""

from __future__ import annotations

from .action import Action, Op
from .shape import PipelineShape

__all__ = ["rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Compute actions of one rank, in order. The shape must have one chunk per rank."""
    warmup = [Action(Op.F, rank, i) for i in range(shape.num_microbatches)]
    cooldown = [Action(Op.B, rank, i) for i in range(shape.num_microbatches)]
    return tuple(warmup + cooldown)

"""ZB-H1: 1F1B with the backward split, its weight half put where 1F1B idles.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedule H1. The backward is I
(gradient of the input, which the previous stage waits for) and W (gradient of the weights, which
nobody waits for). Rank r runs W a further r microbatches behind I. A microbatch is in flight until
its W, so every rank holds at most ``num_ranks``: what 1F1B holds on rank 0, its fullest rank.
"""

from __future__ import annotations

from .action import Action, Op
from .in_flight import InFlight
from .shape import PipelineShape

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Compute actions of one rank, in order. The shape must have one chunk per rank."""
    total = shape.num_microbatches
    num_warmup = min(shape.num_ranks - rank - 1, total)
    num_steady = total - num_warmup

    def backward(i: int) -> list[Action]:
        delayed = [Action(Op.W, rank, i - rank)] if i >= rank else []
        return [Action(Op.I, rank, i), *delayed]

    warmup = [Action(Op.F, rank, i) for i in range(num_warmup)]
    steady = [
        action
        for i in range(num_steady)
        for action in (Action(Op.F, rank, num_warmup + i), *backward(i))
    ]
    cooldown = [action for i in range(num_steady, total) for action in backward(i)]
    rest = [Action(Op.W, rank, i) for i in range(max(total - rank, 0), total)]
    return tuple(warmup + steady + cooldown + rest)


def in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Most microbatches in flight on a rank, in a step of this many or of fewer."""
    most = min(shape.num_ranks, shape.num_microbatches)
    return InFlight((most,), most)


def idle_forwards(shape: PipelineShape) -> int:
    """Time every rank idles: F and I of each of the others, less what it fills with W.

    F, I and W take one forward each.
    """
    num_filled = min(shape.num_microbatches, shape.num_ranks) - 1
    return 2 * (shape.num_ranks - 1) - num_filled

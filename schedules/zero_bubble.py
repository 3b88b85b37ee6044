"""ZB-H1: 1F1B with the backward split, its weight half put where 1F1B idles.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedule H1. The backward is I
(gradient of the input, which the previous stage waits for) and W (gradient of the weights, which
nobody waits for). Rank r runs W a further r microbatches after I. A microbatch is in flight until
its W, so every rank holds at most ``num_ranks``: what 1F1B holds on rank 0, its fullest rank.

Several chunks take turns as in interleaved 1F1B; one forward of warmup per rank is enough then too.
"""

from __future__ import annotations

from itertools import zip_longest

from .action import Action, Op
from .in_flight import InFlight
from .interleaved import most_in_flight, walk
from .shape import PipelineShape

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Compute actions of one rank, in order."""
    forwards, input_grads, weight_grads = (walk(shape, rank, op) for op in (Op.F, Op.I, Op.W))
    num_warmup = min(_lead(shape) - rank, len(forwards))

    # Each turn is F, I and the W of `rank` turns before, as long as there are any.
    delayed = [None] * rank + weight_grads
    turns = zip_longest(forwards[num_warmup:], input_grads, delayed)
    return (
        *forwards[:num_warmup],
        *(action for turn in turns for action in turn if action is not None),
    )


def in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Most microbatches in flight on a rank, in a step of this many or of fewer."""
    if shape.num_chunks == 1:
        most = min(shape.num_ranks, shape.num_microbatches)
        return InFlight((most,), most)
    # Each rank starts one forward later than the one before it, and runs W one turn later after I.
    return most_in_flight(shape, _lead(shape))


def idle_forwards(shape: PipelineShape) -> int:
    """Time every rank idles: F and I of each of the others, less what it fills with W.

    F, I and W take one forward each.
    """
    num_filled = min(shape.num_microbatches, shape.num_ranks) - 1
    return 2 * (shape.num_ranks - 1) - num_filled


def _lead(shape: PipelineShape) -> int:
    """Forwards that rank 0 runs before its first pair of a forward and a backward."""
    return (shape.num_chunks - 1) * shape.turn_size + shape.num_ranks - 1

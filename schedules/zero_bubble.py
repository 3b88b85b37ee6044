"""ZB-H1: 1F1B with split backwards, whose weight gradients run where 1F1B idles.

Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedule H1. The backward is I (the
input gradient, which the previous stage waits for) and W (the weight gradients, which no stage
waits for). Rank r runs W r microbatches after I. A microbatch is in flight until its W, so every
rank holds at most ``num_ranks``: as much as 1F1B on rank 0, its fullest rank.

Several chunks take turns as in interleaved 1F1B; one warmup forward per rank is enough there too.
"""

from __future__ import annotations

from itertools import zip_longest

from .action import Action, Op
from .in_flight import InFlight
from .interleaved import most_in_flight, walk
from .shape import PipelineShape

__all__ = ["idle_forwards", "in_flight", "rank_actions"]


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order."""
    forwards, input_grads, weight_grads = (walk(shape, rank, op) for op in (Op.F, Op.I, Op.W))
    num_warmup = min(_lead(shape) - rank, len(forwards))

    # Each turn is F, I and the W of `rank` turns earlier, as far as they exist.
    delayed = [None] * rank + weight_grads
    turns = zip_longest(forwards[num_warmup:], input_grads, delayed)
    return (
        *forwards[:num_warmup],
        *(action for turn in turns for action in turn if action is not None),
    )


def in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    if shape.num_chunks == 1:
        most = min(shape.num_ranks, shape.num_microbatches)
        return InFlight((most,), most)
    # Rank r has r forwards less of warmup than rank 0, but runs W r turns after I.
    return most_in_flight(shape, _lead(shape))


def idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: F and I of each other rank, less the Ws in it.

    F, I and W take one forward each.
    """
    num_filled = min(shape.num_microbatches, shape.num_ranks) - 1
    return 2 * (shape.num_ranks - 1) - num_filled


def _lead(shape: PipelineShape) -> int:
    """Return the forwards that rank 0 runs before its first pair of a forward and a backward."""
    return (shape.num_chunks - 1) * shape.turn_size + shape.num_ranks - 1

"""Interleaved 1F1B and ZB-H1: chunks take turns, microbatches in groups.

Interleaved 1F1B: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", in Megatron-core's order: every rank walks one table of (microbatch,
chunk) pairs, group by group, and chunk by chunk within a group. Backwards walk the same table with
the chunks reversed. The last group may be smaller (see build.py). Does not model Megatron's
``overlap_moe_expert_parallel_comm``, which adds one warmup forward.

ZB-H1 is 1F1B with split backwards, whose weight gradients run where 1F1B idles: Qi et al. 2023,
"Zero Bubble Pipeline Parallelism", handcrafted schedule H1. The backward is I (the input gradient,
which the previous stage waits for) and W (the weight gradients, which no stage waits for). Rank r
runs W r microbatches after I. A microbatch is in flight until its W, so every rank holds at most
``num_ranks``: as much as 1F1B on rank 0, its fullest rank. Several chunks take turns as in
interleaved 1F1B; one warmup forward per rank is enough there too.
"""

from __future__ import annotations

from itertools import zip_longest

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.shape import InFlight, PipelineShape, stage_of


def _chunk_table(shape: PipelineShape) -> list[tuple[int, int]]:
    """Return the (microbatch, chunk) pairs of a step in the order of their forwards."""
    group = shape.turn_size
    return [
        (microbatch, chunk)
        for first in range(0, shape.num_microbatches, group)
        for chunk in range(shape.num_chunks)
        for microbatch in range(first, min(first + group, shape.num_microbatches))
    ]


def _walk(shape: PipelineShape, rank: int, op: Op) -> list[Action]:
    """Return a rank's actions of one operation, in order; all but F reverse the chunks."""
    last_chunk = shape.num_chunks - 1
    return [
        Action(op, stage_of(rank, place if op is Op.F else last_chunk - place, shape.num_ranks), i)
        for i, place in _chunk_table(shape)
    ]


def interleaved_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order."""
    forwards, backwards = _walk(shape, rank, Op.F), _walk(shape, rank, Op.B)
    num_warmup = min(_warmup_of_long_steps(shape, rank), len(forwards))
    num_steady = len(forwards) - num_warmup

    warmup = forwards[:num_warmup]
    steady = [
        action
        for pair in zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
        for action in pair
    ]
    cooldown = backwards[num_steady:]
    return tuple(warmup + steady + cooldown)


def interleaved_in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Return the most microbatches in flight on a rank, in any legal step of this many or fewer."""
    return _most_in_flight(shape, _warmup_of_long_steps(shape, rank))


def _most_in_flight(shape: PipelineShape, lead: int) -> InFlight:
    """Return the most microbatches in flight on a rank.

    A chunk's count peaks right after its last forward of a group. Only the group before that one
    matters too, because its backwards may still be running. So it suffices to look at the first
    group, and at a second group of any legal size. The count there is piecewise linear in that
    size, and decreases only from the size at which the backwards of a group begin.

    Args:
        shape: sizes of the pipeline.
        lead: (microbatch, chunk) pairs by which the rank's forwards lead its releases.
    """
    group = shape.turn_size
    least, most = shape.num_ranks, min(group, shape.num_microbatches - group)

    def peak(chunk: int) -> int:
        sizes: set[int | None] = {None}
        if least <= most:
            turns = [(lead + 1) // (chunk + 1) - before for before in (0, group)]
            sizes |= {most, *(min(max(least, turn + i), most) for turn in turns for i in (0, 1))}
        return max(_num_held(shape, lead, chunk, size) for size in sizes)

    largest_step = (group + most if least <= most else group) * shape.num_chunks
    return InFlight(
        per_chunk=tuple(peak(chunk) for chunk in range(shape.num_chunks)),
        together=min(lead + 1, largest_step),
    )


def _num_held(shape: PipelineShape, lead: int, chunk: int, size: int | None) -> int:
    """Return a chunk's microbatches in flight right after its last forward of a group.

    Args:
        shape: sizes of the pipeline.
        lead: forwards that run before the first pair of a forward and a release.
        chunk: index of the chunk on its rank.
        size: microbatches of the second group; None: look at the first group, which is whole.
    """
    group, last_chunk = shape.turn_size, shape.num_chunks - 1
    current = group if size is None else size
    # Releases of all chunks so far, counted from the start of the group.
    num_released = (chunk + 1) * current - 1 - lead
    num_held = current - _clamp(num_released - (last_chunk - chunk) * current, current)
    if size is not None:
        num_held += group - _clamp(num_released + (chunk + 1) * group, group)
    return num_held


def _clamp(value: int, most: int) -> int:
    return min(max(value, 0), most)


def _warmup_of_long_steps(shape: PipelineShape, rank: int) -> int:
    return 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * shape.turn_size


def zb_h1_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Return one rank's compute actions, in order."""
    forwards, input_grads, weight_grads = (_walk(shape, rank, op) for op in (Op.F, Op.I, Op.W))
    num_warmup = min(_lead(shape) - rank, len(forwards))

    # Each turn is F, I and the W of `rank` turns earlier, as far as they exist.
    delayed = [None] * rank + weight_grads
    turns = zip_longest(forwards[num_warmup:], input_grads, delayed)
    return (
        *forwards[:num_warmup],
        *(action for turn in turns for action in turn if action is not None),
    )


def zb_h1_in_flight(shape: PipelineShape, rank: int) -> InFlight:  # noqa: ARG001
    """Return the most microbatches in flight on a rank, in a step of this many or fewer."""
    if shape.num_chunks == 1:
        most = min(shape.num_ranks, shape.num_microbatches)
        return InFlight((most,), most)
    # Rank r has r forwards less of warmup than rank 0, but runs W r turns after I.
    return _most_in_flight(shape, _lead(shape))


def zb_h1_idle_forwards(shape: PipelineShape) -> int:
    """Return every rank's idle time in forwards: F and I of each other rank, less the Ws in it.

    F, I and W take one forward each.
    """
    num_filled = min(shape.num_microbatches, shape.num_ranks) - 1
    return 2 * (shape.num_ranks - 1) - num_filled


def _lead(shape: PipelineShape) -> int:
    """Return the forwards that rank 0 runs before its first pair of a forward and a backward."""
    return (shape.num_chunks - 1) * shape.turn_size + shape.num_ranks - 1

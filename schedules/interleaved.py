"""Interleaved 1F1B: several model chunks per rank, microbatches in groups.

Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", in Megatron-core's order: every rank walks one table of (microbatch, chunk) pairs,
group by group and in a group chunk by chunk; backwards walk the same table with the chunks
reversed. The last group may be smaller (see legality.py).

Megatron's ``overlap_moe_expert_parallel_comm``, which adds one forward to the warmup, is not
modelled.
"""

from __future__ import annotations

from .action import Action, Op
from .in_flight import InFlight
from .placement import stage_of
from .shape import PipelineShape

__all__ = [
    "chunk_table",
    "idle_forwards",
    "in_flight",
    "most_in_flight",
    "num_warmup_forwards",
    "rank_actions",
    "walk",
]


def chunk_table(shape: PipelineShape) -> list[tuple[int, int]]:
    """The (microbatch, chunk) pairs of a step in the order of their forwards."""
    group = shape.turn_size
    return [
        (microbatch, chunk)
        for first in range(0, shape.num_microbatches, group)
        for chunk in range(shape.num_chunks)
        for microbatch in range(first, min(first + group, shape.num_microbatches))
    ]


def walk(shape: PipelineShape, rank: int, op: Op) -> list[Action]:
    """All actions of one operation on a rank, in order: the chunks reversed but for forwards."""
    last_chunk = shape.num_chunks - 1
    return [
        Action(op, stage_of(rank, place if op is Op.F else last_chunk - place, shape.num_ranks), i)
        for i, place in chunk_table(shape)
    ]


def num_warmup_forwards(shape: PipelineShape, rank: int) -> int:
    """Forwards a rank runs before its first backward has a forward to pair with."""
    return min(_warmup_of_long_steps(shape, rank), shape.num_microbatches * shape.num_chunks)


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Compute actions of one rank, in order."""
    forwards, backwards = walk(shape, rank, Op.F), walk(shape, rank, Op.B)
    num_warmup = num_warmup_forwards(shape, rank)
    num_steady = len(forwards) - num_warmup

    warmup = forwards[:num_warmup]
    steady = [
        action
        for pair in zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
        for action in pair
    ]
    cooldown = backwards[num_steady:]
    return tuple(warmup + steady + cooldown)


def in_flight(shape: PipelineShape, rank: int) -> InFlight:
    """Most microbatches in flight on a rank, in a step of this many or of any fewer it may have."""
    return most_in_flight(shape, _warmup_of_long_steps(shape, rank))


def most_in_flight(shape: PipelineShape, lead: int) -> InFlight:
    """Most microbatches in flight on a rank whose forwards lead its releases by so many pairs.

    A forward of chunk c adds one to what it has in flight, so the most is there right after its
    last forward of a group. Groups before that one make no difference but for the last of them,
    whose backwards may still be going on. So all there is to look at are the first group, and a
    second of any legal size. What is held there is piecewise linear in that size; it turns
    downwards only where the backwards of a group begin.
    """
    group = shape.turn_size
    least, most = shape.num_ranks, min(group, shape.num_microbatches - group)

    def peak(chunk: int) -> int:
        sizes: set[int | None] = {None}
        if least <= most:
            turns = [(lead + 1) // (chunk + 1) - before for before in (0, group)]
            sizes |= {most, *(min(max(least, turn + i), most) for turn in turns for i in (0, 1))}
        return max(_held(shape, lead, chunk, size) for size in sizes)

    largest_step = (group + most if least <= most else group) * shape.num_chunks
    return InFlight(
        per_chunk=tuple(peak(chunk) for chunk in range(shape.num_chunks)),
        together=min(lead + 1, largest_step),
    )


def idle_forwards(shape: PipelineShape) -> int:
    """Time every rank idles: a forward and a backward (two forwards) of each of the others."""
    return 3 * (shape.num_ranks - 1)


def _held(shape: PipelineShape, lead: int, chunk: int, size: int | None) -> int:
    """What a chunk has in flight right after its last forward of a group.

    Args:
        shape: Sizes of the pipeline.
        lead: Forwards that run before the first pair of a forward and a release.
        chunk: Index of the chunk on its rank.
        size: Microbatches of the second group; None is for the first, which is whole.
    """
    group, last_chunk = shape.turn_size, shape.num_chunks - 1
    own = group if size is None else size
    # Releases so far, of all chunks, counted from the start of the group.
    done = (chunk + 1) * own - 1 - lead
    held = own - _clamp(done - (last_chunk - chunk) * own, own)
    if size is not None:
        held += group - _clamp(done + (chunk + 1) * group, group)
    return held


def _clamp(value: int, most: int) -> int:
    return min(max(value, 0), most)


def _warmup_of_long_steps(shape: PipelineShape, rank: int) -> int:
    return 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * shape.turn_size

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
from .placement import stage_of
from .shape import PipelineShape

__all__ = ["chunk_table", "num_warmup_forwards", "rank_actions"]


def chunk_table(shape: PipelineShape) -> list[tuple[int, int]]:
    """The (microbatch, chunk) pairs of a step in the order of their forwards."""
    group = shape.num_ranks if shape.group_size is None else shape.group_size
    return [
        (microbatch, chunk)
        for first in range(0, shape.num_microbatches, group)
        for chunk in range(shape.num_chunks)
        for microbatch in range(first, min(first + group, shape.num_microbatches))
    ]


def num_warmup_forwards(shape: PipelineShape, rank: int) -> int:
    """Forwards a rank runs before its first backward has a forward to pair with."""
    group = shape.num_ranks if shape.group_size is None else shape.group_size
    wanted = 2 * (shape.num_ranks - rank - 1) + (shape.num_chunks - 1) * group
    return min(wanted, shape.num_microbatches * shape.num_chunks)


def rank_actions(shape: PipelineShape, rank: int) -> tuple[Action, ...]:
    """Compute actions of one rank, in order."""
    table = chunk_table(shape)
    last_chunk = shape.num_chunks - 1
    forwards = [
        Action(Op.F, stage_of(rank, chunk, shape.num_ranks), microbatch)
        for microbatch, chunk in table
    ]
    backwards = [
        Action(Op.B, stage_of(rank, last_chunk - chunk, shape.num_ranks), microbatch)
        for microbatch, chunk in table
    ]
    num_warmup = num_warmup_forwards(shape, rank)
    num_steady = len(table) - num_warmup

    warmup = forwards[:num_warmup]
    steady = [
        action
        for pair in zip(forwards[num_warmup:], backwards[:num_steady], strict=True)
        for action in pair
    ]
    cooldown = backwards[num_steady:]
    return tuple(warmup + steady + cooldown)

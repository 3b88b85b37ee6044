"""Schedules by name and sizes."""

from __future__ import annotations

from .legality import check_step
from .registry import get_family, megatron_schedule_name
from .schedule import Schedule

__all__ = ["build_schedule", "megatron_schedule"]


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> Schedule:
    """Build one schedule, compute actions only.

    Args:
        name: One of ``list_schedules()``.
        num_ranks: Pipeline-parallel size.
        num_microbatches: Microbatches in the step.
        num_chunks: Model chunks on each rank; above 1 only where the schedule has several.
        group_size: Microbatch group size of interleaved schedules, default ``num_ranks``; ignored,
            as Megatron does, where chunks do not interleave.

    Raises:
        ConfigError: Unknown name.
        TopologyError: The sizes do not form a pipeline, or the microbatch count is not legal.
    """
    shape = check_step(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    family = get_family(name)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group_size=shape.group_size,
        actions=tuple(family.rank_actions(shape, rank) for rank in range(num_ranks)),
        placement=family.placement,
    )


def megatron_schedule(
    num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> Schedule:
    """The schedule Megatron-core runs for these sizes: 1F1B, or interleaved for several chunks.

    Raises:
        TopologyError: Megatron would refuse these sizes too.
    """
    return build_schedule(
        megatron_schedule_name(num_ranks, num_chunks),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
    )

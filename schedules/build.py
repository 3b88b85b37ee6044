"""Build schedules by name and sizes."""

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
    """Build a schedule of compute actions, without sends and receives.

    Args:
        name: one of ``list_schedules()``.
        num_ranks: pipeline-parallel size.
        num_microbatches: microbatches of the step.
        num_chunks: model chunks per rank; above 1 only if the schedule has several.
        group_size: microbatch group size of interleaved schedules; None: ``num_ranks``. Ignored for
            other schedules, as in Megatron.

    Raises:
        ConfigError: the name is unknown.
        TopologyError: the sizes do not form a pipeline, or the microbatch count is not legal.
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
    """Build Megatron-core's schedule for these sizes: 1F1B, or interleaved for several chunks.

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

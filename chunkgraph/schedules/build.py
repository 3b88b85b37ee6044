"""Build schedules by name and sizes, after a check of the sizes and the microbatch count.

The interleaved rules are those that Megatron-core checks at the start of its interleaved schedule
(0.16 and 0.19): the group size lies between the pipeline size and the number of microbatches, and
the last, partial group is empty or at least as large as the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.errors import TopologyError
from chunkgraph.schedules.registry import get_family, megatron_schedule_name
from chunkgraph.schedules.schedule import Schedule
from chunkgraph.schedules.shape import PipelineShape

MAX_STAGES = 1024
"""A stage holds at least a layer; tables and plans of more would take minutes."""


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
        megatron_schedule_name(num_chunks),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
    )


@dataclass(frozen=True, slots=True)
class LegalCounts:
    """The numbers of microbatches that a step may have.

    They are at least ``least``, and form whole groups and a tail of 0 or ``least_tail`` or more.
    """

    least: int
    group_size: int = 1
    least_tail: int = 1

    def __contains__(self, count: int) -> bool:
        tail = count % self.group_size
        is_integer = tail == 0 or tail >= self.least_tail
        return count >= self.least and self.group_size >= self.least_tail and is_integer

    def up_to(self, most: int) -> tuple[int, ...]:
        """Return all from 1 to ``most`` inclusive, ascending."""
        return tuple(count for count in range(1, most + 1) if count in self)

    def nearest(self, count: int) -> tuple[int, ...]:
        """Return the closest ones below and above a number, as far as they exist."""
        if self.group_size < self.least_tail:
            return ()
        below, above = count - 1, max(count + 1, self.least)
        # A tail that is too small shrinks to 0 below, and grows to the least tail above.
        if below % self.group_size < self.least_tail:
            below -= below % self.group_size
        if 0 < above % self.group_size < self.least_tail:
            above += self.least_tail - above % self.group_size
        return (below, above) if below >= self.least else (above,)


def legal_counts(
    *, num_ranks: int, num_chunks: int = 1, group_size: int | None = None, schedule: str = "auto"
) -> LegalCounts:
    """Return the numbers of microbatches that a step may have.

    Args:
        num_ranks: pipeline-parallel size.
        num_chunks: model chunks per rank.
        group_size: microbatch group size of an interleaved schedule; None: ``num_ranks``.
        schedule: a schedule name, or ``auto`` for Megatron's schedule.
    """
    family = get_family(megatron_schedule_name(num_chunks) if schedule == "auto" else schedule)
    if not family.interleaves:
        return LegalCounts(max(1, family.least_microbatches_per_rank * num_ranks))
    group = num_ranks if group_size is None else group_size
    return LegalCounts(group, group, num_ranks)


def check_sizes(name: str, *, num_ranks: int, num_chunks: int, group_size: int | None) -> None:
    """Check all sizes of a schedule except the number of microbatches.

    Args:
        name: schedule name.
        num_ranks: pipeline-parallel size.
        num_chunks: model chunks per rank.
        group_size: microbatch group size; None: ``num_ranks``.

    Raises:
        ConfigError: the name is unknown.
        TopologyError: the sizes cannot form this pipeline.
    """
    family = get_family(name)
    for what, value in (("num_ranks", num_ranks), ("num_chunks", num_chunks)):
        if value < 1:
            raise TopologyError(f"schedule {name!r}: {what} is {value}, but must be at least 1")
    if num_ranks * num_chunks > MAX_STAGES:
        raise TopologyError(f"schedule {name!r}: a pipeline has at most {MAX_STAGES} stages")
    if family.num_chunks is not None and num_chunks != family.num_chunks:
        count = f"{'one' if family.num_chunks == 1 else 'two'} model chunk"
        count += "s" if family.num_chunks > 1 else ""
        other = "interleaved-zb" if family.splits_backward else "interleaved"
        instead = f"use {other!r}, or " if family.num_chunks == 1 else ""
        raise TopologyError(
            f"schedule {name!r} runs {count} on each rank, but num_chunks is {num_chunks}: "
            f"{instead}set the virtual pipeline size to {family.num_chunks}"
        )
    if family.interleaves and num_chunks == 1:
        raise TopologyError(
            f"schedule {name!r} needs at least 2 model chunks on each rank, but num_chunks is 1: "
            f"use {'zb-h1' if family.splits_backward else '1f1b'!r}, or set a virtual pipeline "
            "size of 2 or more"
        )
    if num_ranks == 1 and num_chunks > 1:
        raise TopologyError(
            f"schedule {name!r} needs at least 2 pipeline ranks, but num_ranks is 1 with "
            f"num_chunks {num_chunks}: with one rank set the virtual pipeline size to 1"
        )
    if not family.interleaves:
        return
    if group_size is not None and group_size < num_ranks:
        raise TopologyError(
            f"schedule {name!r}: the microbatch group size is {group_size}, but must be at least "
            f"the pipeline size {num_ranks}: leave it out to use {num_ranks}"
        )


def check_step(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> PipelineShape:
    """Check all sizes of a schedule; for the arguments see `build_schedule`.

    Returns:
        The shape of the schedule.

    Raises:
        ConfigError: the name is unknown.
        TopologyError: the sizes are not legal; the message has the rule and the nearest legal
            microbatch counts.
    """
    interleaves = get_family(name).interleaves
    group = None if not interleaves else num_ranks if group_size is None else group_size
    check_sizes(name, num_ranks=num_ranks, num_chunks=num_chunks, group_size=group)
    shape = PipelineShape(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group,
    )
    counts = legal_counts(
        num_ranks=num_ranks, num_chunks=num_chunks, group_size=group, schedule=name
    )
    if num_microbatches in counts:
        return shape
    if group is not None:
        needs = f"one group of {group} or more, and a last group of none or at least {num_ranks}"
    elif per_rank := get_family(name).least_microbatches_per_rank:
        needs = f"{per_rank} for each of the {num_ranks} ranks"
    else:
        needs = "at least 1"
    raise TopologyError(
        f"schedule {name!r}: num_microbatches {num_microbatches} is not legal: it needs {needs} "
        f"(nearest legal: {' or '.join(map(str, counts.nearest(num_microbatches)))})"
    )

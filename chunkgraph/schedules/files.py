"""Schedules from CSV files, and their checks for a pipeline of Megatron."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from chunkgraph._inputs import read_input
from chunkgraph._text import counted, shorten
from chunkgraph.errors import ConfigError
from chunkgraph.schedules.action import Op
from chunkgraph.schedules.build import check_sizes
from chunkgraph.schedules.registry import get_family, list_schedules
from chunkgraph.schedules.schedule import Schedule
from chunkgraph.schedules.shape import Placement
from chunkgraph.schedules.validate import validate

FILE_SUFFIX = ".csv"
"""Distinguishes a schedule's file from a name."""
_MAX_FILE_BYTES = 512 * 2**10


def read_schedule(name: str) -> Schedule | None:
    """Read the schedule of a CSV file; return None for the name of a schedule.

    Raises:
        ConfigError: The file cannot be read.
        ScheduleError: It holds no valid schedule.
    """
    if not name.endswith(FILE_SUFFIX):
        return None
    advice = "Pass a CSV file with a row for each rank."
    content = read_input(name, "the schedule", advice, _MAX_FILE_BYTES)
    name = shorten(name)
    schedule = Schedule.from_csv(content.decode(errors="replace"), name=name)
    validate(schedule)
    return schedule


def _check_stages(schedule: Schedule, num_ranks: int, num_chunks: int) -> None:
    """Compare the stages of a schedule from a file with Megatron's.

    Raises:
        ConfigError: It has other ranks or stages, or places them otherwise.
    """
    name = schedule.name
    sizes = (schedule.num_ranks, schedule.num_chunks)
    if sizes != (num_ranks, num_chunks):
        raise ConfigError(
            f"{name} has {counted(sizes[0], 'rank')} of {counted(sizes[1], 'chunk')}, but the "
            f"pipeline has {num_ranks} of {num_chunks}."
        )
    if schedule.placement is not Placement.LOOP:
        raise ConfigError(
            f"{name} places stages in a V, but Megatron's pipelines are loops: rank r holds the "
            "stages r, r + size, ... Number the stages in this order."
        )


def check_order(schedule: Schedule) -> None:
    """Check that each chunk runs its microbatches in order.

    Weight gradients may have any order in the file: a chunk always computes those that have waited
    longest.

    Raises:
        ConfigError: Forwards, backwards or receives of a chunk are in another order.
    """
    for rank, actions in enumerate(schedule.actions):
        num_done: Counter[tuple[int, str]] = Counter()
        for action in actions:
            if (part := _ORDERED.get(action.op)) is None:
                continue
            expected = num_done[action.stage, part]
            if action.microbatch != expected:
                raise ConfigError(
                    f"{schedule.name}: row {rank + 1} has {action} before the {part} of "
                    f"microbatch {expected}. Megatron trains microbatches in order: its data "
                    "iterators have no other, and sums of gradients would have other bits. "
                    "Let the forwards of a stage begin with microbatch 0 and count up, and its "
                    "backwards and receives too."
                )
            num_done[action.stage, part] += 1


_ORDERED = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.RECV_F: "received input",
    Op.RECV_B: "received gradient",
}
"""What actions whose order matters do."""


def check_counts(schedule: Schedule, counts: Iterable[int], setting: str) -> None:
    """Compare the number of microbatches of a schedule from a file with those of the steps.

    Args:
        schedule: The schedule.
        counts: The microbatches of each step.
        setting: What sets them.

    Raises:
        ConfigError: There is another number.
    """
    if others := sorted(set(counts) - {schedule.num_microbatches}):
        raise ConfigError(
            f"{schedule.name} is a schedule of {counted(schedule.num_microbatches, 'microbatch')}, "
            f"but a step has {', '.join(map(str, others))}. Change {setting}, or use a schedule "
            "by name."
        )


def read_matching_schedule(
    name: str, num_ranks: int, num_chunks: int, counts: Iterable[int] = (), setting: str = ""
) -> Schedule | None:
    """Read the schedule of a CSV file for a pipeline of Megatron.

    Args:
        name: The file, or the name of a schedule.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        counts: The microbatches of each step, if they are known.
        setting: What sets them.

    Returns:
        The schedule; None for a name, of which only the sizes are checked.

    Raises:
        ConfigError: The file cannot be read, or does not match the pipeline or the steps.
        ScheduleError: It holds no valid schedule.
        TopologyError: The schedule of this name does not exist for the pipeline.
    """
    schedule = read_schedule(name)
    if schedule is not None:
        _check_stages(schedule, num_ranks, num_chunks)
        check_order(schedule)
        check_counts(schedule, counts, setting)
    elif name != "auto":
        check_sizes(name, num_ranks=num_ranks, num_chunks=num_chunks, group_size=None)
    return schedule


def splits_backward(name: str) -> bool:
    """Return whether a schedule computes weight gradients apart from input gradients.

    Raises:
        ConfigError: The schedule's file cannot be read.
        ScheduleError: It holds no valid schedule.
    """
    if (schedule := read_schedule(name)) is not None:
        return schedule.splits_backward
    return name in list_schedules() and get_family(name).splits_backward

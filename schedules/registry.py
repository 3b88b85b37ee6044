"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkgraph._text import did_you_mean
from chunkgraph.errors import ConfigError, TopologyError

from . import gpipe, interleaved, one_f_one_b, zero_bubble
from .action import Action
from .in_flight import InFlight
from .legality import check_shape
from .schedule import Schedule
from .shape import PipelineShape

__all__ = [
    "ScheduleFamily",
    "build_schedule",
    "check_step",
    "get_family",
    "list_schedules",
    "megatron_schedule",
    "megatron_schedule_name",
]


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A rule that makes a schedule for any legal shape.

    Attributes:
        name: What users type.
        summary: One line for help texts.
        rank_actions: Compute actions of one rank of a legal shape, in order.
        in_flight: Largest numbers in flight on one rank, over all legal steps of up to the shape's
            number of microbatches; what counting along the actions of each would give.
        idle_forwards: Time for which every rank of a legal shape idles, at the costs that are the
            defaults of ``CostModel``; what simulating would give.
        interleaves: Made for several chunks per rank, rather than for exactly one.
        is_bounded: The number of microbatches in flight has a limit that does not grow with the
            number in the step.
    """

    name: str
    summary: str
    rank_actions: Callable[[PipelineShape, int], tuple[Action, ...]]
    in_flight: Callable[[PipelineShape, int], InFlight]
    idle_forwards: Callable[[PipelineShape], int]
    interleaves: bool
    is_bounded: bool

    def bubble_ratio(self, shape: PipelineShape) -> float:
        """The idle share of every rank, as ``Simulation.bubble_ratio`` with its default costs."""
        busy = 3 * shape.num_chunks * shape.num_microbatches
        return 1.0 - busy / (busy + self.idle_forwards(shape))


_FAMILIES = (
    ScheduleFamily(
        "1f1b", "one forward, one backward (Megatron without VPP)",
        one_f_one_b.rank_actions, one_f_one_b.in_flight, one_f_one_b.idle_forwards,
        interleaves=False, is_bounded=True,
    ),
    ScheduleFamily(
        "interleaved", "1F1B over several chunks per rank (Megatron with VPP)",
        interleaved.rank_actions, interleaved.in_flight, interleaved.idle_forwards,
        interleaves=True, is_bounded=True,
    ),
    ScheduleFamily(
        "gpipe", "all forwards, then all backwards",
        gpipe.rank_actions, gpipe.in_flight, gpipe.idle_forwards,
        interleaves=False, is_bounded=False,
    ),
    ScheduleFamily(
        "zb-h1", "1F1B with the weight gradients run later, where 1F1B idles",
        zero_bubble.rank_actions, zero_bubble.in_flight, zero_bubble.idle_forwards,
        interleaves=False, is_bounded=True,
    ),
)  # fmt: skip


def list_schedules() -> tuple[str, ...]:
    """The names ``build_schedule`` accepts."""
    return tuple(family.name for family in _FAMILIES)


def get_family(name: str) -> ScheduleFamily:
    """Look a schedule family up.

    Raises:
        ConfigError: There is none of this name; lists those there are.
    """
    for family in _FAMILIES:
        if family.name == name:
            return family
    hint = did_you_mean(name, list_schedules())
    raise ConfigError(f"unknown schedule {name!r}: known are {', '.join(list_schedules())}.{hint}")


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
        num_chunks: Model chunks on each rank; above 1 only for ``interleaved``.
        group_size: Microbatch group size of ``interleaved``, default ``num_ranks``; ignored, as
            Megatron does, where chunks do not interleave.

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
    rank_actions = get_family(name).rank_actions
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group_size=shape.group_size,
        actions=tuple(rank_actions(shape, rank) for rank in range(num_ranks)),
    )


def check_step(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
) -> PipelineShape:
    """The shape of the schedule that ``build_schedule`` builds; arguments and errors are its."""
    family = get_family(name)
    if not family.interleaves:
        group_size = None
    elif group_size is None:
        group_size = num_ranks
    shape = PipelineShape(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    check_shape(name, shape, interleaves=family.interleaves)
    return shape


def megatron_schedule_name(num_ranks: int, num_chunks: int = 1) -> str:
    """The schedule Megatron-core's ``get_forward_backward_func`` runs for these sizes.

    With one rank Megatron runs without a pipeline, which is 1F1B of one rank.

    Raises:
        TopologyError: Several chunks on one rank only, which Megatron does not run.
    """
    if num_ranks == 1 and num_chunks > 1:
        raise TopologyError(
            f"a virtual pipeline size of {num_chunks} needs a pipeline size of at least 2, but it "
            "is 1: set the virtual pipeline size to 1"
        )
    return "interleaved" if num_chunks > 1 else "1f1b"


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

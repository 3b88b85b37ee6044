"""The registry of schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chunkgraph._text import did_you_mean
from chunkgraph.errors import ConfigError
from chunkgraph.schedules import interleaved, one_chunk, v_shaped
from chunkgraph.schedules.action import Action
from chunkgraph.schedules.shape import InFlight, PipelineShape, Placement


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """A rule that builds a schedule for any legal shape.

    Attributes:
        name: the name that users type.
        rank_actions: returns one rank's compute actions, in order.
        in_flight: returns the most microbatches in flight on a rank over all legal steps of up to
            the shape's number of microbatches; equals counting along the actions.
        idle_forwards: returns every rank's idle time at the default costs of `CostModel`; equals
            the simulation. By default a forward and a backward of each other rank.
        num_chunks: chunks per rank; None: any number from 2 on, which interleave.
        placement: the placement of the stages.
        splits_backward: whether some backwards are split into I and W.
        least_microbatches_per_rank: fewest microbatches of a step, divided by the ranks.
        is_bounded: whether the microbatches in flight have a limit that does not grow with the
            step.
    """

    name: str
    rank_actions: Callable[[PipelineShape, int], tuple[Action, ...]]
    in_flight: Callable[[PipelineShape, int], InFlight]
    idle_forwards: Callable[[PipelineShape], int] = lambda shape: 3 * (shape.num_ranks - 1)
    num_chunks: int | None = 1
    placement: Placement = Placement.LOOP
    splits_backward: bool = False
    least_microbatches_per_rank: int = 0
    is_bounded: bool = True

    @property
    def interleaves(self) -> bool:
        """Return whether the chunks of a rank take turns with groups of microbatches."""
        return self.num_chunks is None

    def bubble_ratio(self, shape: PipelineShape) -> float:
        """Return every rank's idle share, as `Simulation.bubble_ratio` with default costs."""
        busy = 3 * shape.num_chunks * shape.num_microbatches
        return 1.0 - busy / (busy + self.idle_forwards(shape))


_FAMILIES = (
    ScheduleFamily("1f1b", one_chunk.one_f_one_b_actions, one_chunk.one_f_one_b_in_flight),
    ScheduleFamily(
        "interleaved", interleaved.interleaved_actions, interleaved.interleaved_in_flight,
        num_chunks=None,
    ),
    ScheduleFamily(
        "gpipe", one_chunk.gpipe_actions, one_chunk.gpipe_in_flight, is_bounded=False,
    ),
    ScheduleFamily(
        "zb-h1", interleaved.zb_h1_actions, interleaved.zb_h1_in_flight,
        interleaved.zb_h1_idle_forwards, splits_backward=True,
    ),
    ScheduleFamily(
        "interleaved-zb", interleaved.zb_h1_actions, interleaved.zb_h1_in_flight,
        interleaved.zb_h1_idle_forwards, num_chunks=None, splits_backward=True,
    ),
    ScheduleFamily(
        "zb-v", v_shaped.zb_v_actions, v_shaped.zb_v_in_flight, v_shaped.zb_v_idle_forwards,
        num_chunks=2, placement=Placement.V, splits_backward=True,
    ),
    ScheduleFamily(
        "dualpipe-v", v_shaped.dualpipe_v_actions, v_shaped.dualpipe_v_in_flight,
        v_shaped.dualpipe_v_idle_forwards,
        num_chunks=2, placement=Placement.V, splits_backward=True, least_microbatches_per_rank=2,
    ),
)  # fmt: skip


def list_schedules() -> tuple[str, ...]:
    """Return the names that `build_schedule` accepts."""
    return tuple(family.name for family in _FAMILIES)


def get_family(name: str) -> ScheduleFamily:
    """Return the schedule family of a name.

    Raises:
        ConfigError: the name is unknown; the message lists the known names.
    """
    for family in _FAMILIES:
        if family.name == name:
            return family
    hint = did_you_mean(name, list_schedules())
    raise ConfigError(f"unknown schedule {name!r}: known are {', '.join(list_schedules())}.{hint}")


def megatron_schedule_name(num_chunks: int = 1) -> str:
    """Return the schedule that Megatron-core's ``get_forward_backward_func`` runs.

    With one rank Megatron runs without a pipeline, which is 1F1B of one rank.
    """
    return "interleaved" if num_chunks > 1 else "1f1b"

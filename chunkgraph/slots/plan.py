"""How many slots each chunk of a rank needs, whatever the number of microbatches.

A chunk needs as many slots as it can ever have microbatches in flight: the largest number over
every legal microbatch count of its schedule, which each schedule knows in closed form
(``ScheduleFamily.in_flight``). Bounded schedules show it with two groups of microbatches at the
latest, or with twice as many as there are ranks. *GPipe* holds all microbatches of a step, so its
plan needs a largest count. Tests compare with brute force.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    PipelineShape,
    check_sizes,
    get_family,
    is_legal_count,
    megatron_schedule_name,
    nearest_legal_counts,
)

__all__ = ["SlotPlan", "plan_all_ranks", "plan_slots"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """The slots of one rank.

    Attributes:
        schedule: Schedule family the plan is for.
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        group_size: Microbatch group size, None where chunks do not interleave.
        rank: Pipeline rank.
        slots_per_chunk: Slots of each model chunk.
        peak_in_flight: Most microbatches in flight at once, all chunks together; at most the sum of
            ``slots_per_chunk``, since chunks do not all peak together.
        max_num_microbatches: The plan holds up to this many microbatches a step; None for any.
    """

    schedule: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    rank: int
    slots_per_chunk: tuple[int, ...]
    peak_in_flight: int
    max_num_microbatches: int | None

    @property
    def num_slots(self) -> int:
        """Slots of all chunks."""
        return sum(self.slots_per_chunk)

    @property
    def num_graphs(self) -> int:
        """Graphs to capture: a forward and a backward for every slot."""
        return 2 * self.num_slots

    def covers(self, num_microbatches: int) -> bool:
        """Whether a step of this many microbatches is legal and fits the slots."""
        cap = self.max_num_microbatches
        return (cap is None or num_microbatches <= cap) and is_legal_count(
            num_microbatches,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            group_size=self.group_size,
        )


def plan_slots(
    num_ranks: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    rank: int,
    schedule: str = "auto",
    max_num_microbatches: int | None = None,
) -> SlotPlan:
    """Plan the slots of one rank.

    Args:
        num_ranks: Pipeline-parallel size.
        num_chunks: Model chunks on each rank.
        group_size: Microbatch group size of ``interleaved``, default ``num_ranks``.
        rank: Pipeline rank, from 0.
        schedule: A schedule name, or ``auto`` for the one Megatron would run.
        max_num_microbatches: A promise that no step has more microbatches; may save slots. Needed
            for schedules, such as ``gpipe``, that hold the more the more there are.

    Raises:
        ConfigError: Unknown schedule, or a promise is missing.
        TopologyError: The sizes do not form a pipeline, or no legal count is within the promise.
    """
    name = megatron_schedule_name(num_ranks, num_chunks) if schedule == "auto" else schedule
    family = get_family(name)
    if not family.interleaves:
        group_size = None
    elif group_size is None:
        group_size = num_ranks
    check_sizes(
        name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=group_size,
        interleaves=family.interleaves,
    )
    if not 0 <= rank < num_ranks:
        raise TopologyError(f"rank {rank} is outside 0..{num_ranks - 1} of {num_ranks} ranks")
    if not family.is_bounded and max_num_microbatches is None:
        raise ConfigError(
            f"schedule {name!r} holds every microbatch of a step at once: give the largest number "
            "of microbatches a step may have (max_num_microbatches)"
        )
    return _plan(name, num_ranks, num_chunks, group_size, rank, max_num_microbatches)


def plan_all_ranks(
    num_ranks: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    *,
    schedule: str = "auto",
    max_num_microbatches: int | None = None,
) -> tuple[SlotPlan, ...]:
    """``plan_slots`` of every rank, in order."""
    return tuple(
        plan_slots(
            num_ranks,
            num_chunks,
            group_size,
            rank=rank,
            schedule=schedule,
            max_num_microbatches=max_num_microbatches,
        )
        for rank in range(num_ranks)
    )


def _plan(
    name: str, num_ranks: int, num_chunks: int, group_size: int | None, rank: int, cap: int | None
) -> SlotPlan:
    family = get_family(name)
    largest = 2 * (group_size or num_ranks) if cap is None else cap
    sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "group_size": group_size}
    smallest = nearest_legal_counts(0, **sizes)[-1]  # type: ignore[arg-type]
    if largest < smallest:
        raise TopologyError(
            f"schedule {name!r} with num_ranks {num_ranks}, num_chunks {num_chunks} and group size "
            f"{group_size} has no legal microbatch count up to {cap}; the smallest is {smallest}"
        )
    shape = PipelineShape(
        num_ranks=num_ranks,
        num_microbatches=largest,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    found = family.in_flight(shape, rank)
    return SlotPlan(
        schedule=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=group_size,
        rank=rank,
        slots_per_chunk=found.per_chunk,
        peak_in_flight=found.together,
        max_num_microbatches=cap,
    )

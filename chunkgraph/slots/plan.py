"""Plan the slots of each chunk of a rank, for any number of microbatches.

A chunk needs one slot for each microbatch that can be in flight: the maximum over all legal
microbatch counts of its schedule, which each schedule has in closed form
(``ScheduleFamily.in_flight``). A bounded schedule reaches it with at most two groups of
microbatches, or twice as many microbatches as ranks. *GPipe* holds all microbatches of a step, so
its plan needs a maximum count. Without a family, slots are counted along the actions.

A microbatch is in flight from its forward F to its B, or to its W if the backward is split: W still
reads saved activations, so I does not end it. Both ends are inclusive; the next action can reuse
the memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    Action,
    InFlight,
    Op,
    PipelineShape,
    Schedule,
    check_sizes,
    chunk_of,
    get_family,
    legal_counts,
    megatron_schedule_name,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotPlan:
    """The slots of one rank.

    Attributes:
        schedule: Name of the schedule.
        num_ranks: Pipeline-parallel size.
        num_chunks: Number of model chunks on each rank.
        group_size: Microbatch group size; None if chunks do not interleave.
        rank: Pipeline rank.
        slots_per_chunk: Number of slots of each model chunk.
        peak_in_flight: Maximum number of microbatches in flight at once in all chunks together; at
            most the sum of ``slots_per_chunk``, since chunks do not all peak together.
        splits_backward: Whether some backwards are split into halves.
    """

    schedule: str
    num_ranks: int
    num_chunks: int
    group_size: int | None
    rank: int
    slots_per_chunk: tuple[int, ...]
    peak_in_flight: int
    splits_backward: bool

    @property
    def num_slots(self) -> int:
        """Return the number of slots of all chunks."""
        return sum(self.slots_per_chunk)

    @property
    def num_graphs(self) -> int:
        """Return the number of graphs: 2 for a slot, or 3 with half a backward for its input."""
        num_split = self.num_slots - (self.slots_per_chunk[0] if self.rank == 0 else 0)
        return 2 * self.num_slots + (num_split if self.splits_backward else 0)


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
        num_chunks: Number of model chunks on each rank.
        group_size: Microbatch group size of interleaved schedules, default ``num_ranks``.
        rank: Pipeline rank, from 0.
        schedule: Name of a schedule, or ``auto`` for the one that Megatron runs.
        max_num_microbatches: Maximum number of microbatches in a step; may save slots. Required
            for unbounded schedules such as ``gpipe``.

    Raises:
        ConfigError: Unknown schedule, or ``max_num_microbatches`` is missing.
        TopologyError: The sizes do not form a pipeline, or no legal count is within the maximum.
    """
    name = megatron_schedule_name(num_chunks) if schedule == "auto" else schedule
    family = get_family(name)
    if not family.interleaves:
        group_size = None
    elif group_size is None:
        group_size = num_ranks
    check_sizes(name, num_ranks=num_ranks, num_chunks=num_chunks, group_size=group_size)
    if not 0 <= rank < num_ranks:
        raise TopologyError(f"rank {rank} is outside 0..{num_ranks - 1} of {num_ranks} ranks")
    if not family.is_bounded and max_num_microbatches is None:
        raise ConfigError(
            f"schedule {name!r} holds every microbatch of a step at once: pass the largest number "
            "of microbatches in a step (max_num_microbatches)"
        )
    largest = max_num_microbatches
    if largest is None:
        largest = 2 * (group_size or num_ranks)
    counts = legal_counts(
        num_ranks=num_ranks, num_chunks=num_chunks, group_size=group_size, schedule=name
    )
    smallest = counts.nearest(0)[-1]
    if largest < smallest:
        groups = "" if group_size is None else f" and group size {group_size}"
        raise TopologyError(
            f"schedule {name!r} with num_ranks {num_ranks}, num_chunks {num_chunks}{groups} has no "
            f"legal microbatch count up to {largest}; the smallest is {smallest}"
        )
    shape = PipelineShape(
        num_ranks=num_ranks,
        num_microbatches=largest,
        num_chunks=num_chunks,
        group_size=group_size,
    )
    peak = family.in_flight(shape, rank)
    return SlotPlan(
        schedule=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=group_size,
        rank=rank,
        slots_per_chunk=peak.per_chunk,
        peak_in_flight=peak.together,
        splits_backward=family.splits_backward,
    )


def plan_schedule(schedule: Schedule, rank: int) -> SlotPlan:
    """Plan the slots of one rank for the steps of one schedule.

    Args:
        schedule: A valid schedule.
        rank: Pipeline rank, from 0.
    """
    counts = in_flight(
        schedule.compute_actions(rank),
        num_ranks=schedule.num_ranks,
        num_chunks=schedule.num_chunks,
    )
    return SlotPlan(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_chunks=schedule.num_chunks,
        group_size=schedule.group_size,
        rank=rank,
        slots_per_chunk=counts.per_chunk,
        peak_in_flight=counts.together,
        splits_backward=schedule.splits_backward,
    )


def in_flight(actions: Iterable[Action], *, num_ranks: int, num_chunks: int) -> InFlight:
    """Count the microbatches in flight along the actions of one rank."""
    current, peak = [0] * num_chunks, [0] * num_chunks
    together = peak_together = 0
    for action in actions:
        if action.op is Op.F:
            chunk = chunk_of(action.stage, num_ranks)
            current[chunk] += 1
            peak[chunk] = max(peak[chunk], current[chunk])
            together += 1
            peak_together = max(peak_together, together)
        elif action.op.ends_lifetime:
            current[chunk_of(action.stage, num_ranks)] -= 1
            together -= 1
    return InFlight(tuple(peak), peak_together)


def assign_slots(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Return the slot of every (stage, microbatch): the chunk's lowest free one at the forward.

    ``SlotMachine`` assigns the same slots when it runs the schedule. A chunk never uses more slots
    than it has microbatches in flight at once.
    """
    slots: dict[tuple[int, int], int] = {}
    for rank in range(schedule.num_ranks):
        free: dict[int, list[int]] = {}  # a heap, and at its end the lowest slot never used
        for action in schedule.compute_actions(rank):
            heap = free.setdefault(action.stage, [0])
            if action.op is Op.F:
                slots[action.stage, action.microbatch] = slot = heappop(heap)
                heap[:] = heap or [slot + 1]
            elif action.op.ends_lifetime:
                heappush(heap, slots[action.stage, action.microbatch])
    return slots

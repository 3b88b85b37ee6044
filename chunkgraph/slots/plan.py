"""How many slots each chunk of a rank needs, whatever the number of microbatches.

A chunk needs as many slots as it can ever have microbatches in flight: the largest number over
every legal microbatch count of its schedule. Finitely many counts are enough to look at. Let P be
the number of ranks, V of chunks, G the group size.

*1F1B* holds ``min(M, P - rank)`` of M microbatches, *ZB-H1* ``min(M, P)``: M = P shows the peak.

*Interleaved*: in the steady phase, right after forward i, chunk c has A(i + 1) - D(i - w) in
flight, where A counts the forwards of c among the first entries of the table, D its backwards, and
w is the number of warmup forwards; nothing later in the step is higher. All but the last group of
the table repeat with period G * V. Take M >= 4 G.

- If i - w >= G * V, one whole group can be cut from the front: both counts lose G, and M - G
  (legal, with the same tail) shows the same value.
- Otherwise i + 1 <= w + G * V. As w <= 2 (P - 1) + (V - 1) G and P <= G, this is below
  (2 V + 1) G, hence within the first three groups (V >= 2), which M - G has in full too.

So a peak at M >= 4 G is also seen at M - G, and the legal M below 4 G are all there is to look at.
The same holds for all chunks counted together. Tests compare with brute force.

*GPipe* holds all M of them, so its plan needs a largest M.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from chunkgraph.errors import ConfigError, TopologyError
from chunkgraph.schedules import (
    PipelineShape,
    check_sizes,
    get_family,
    is_legal_count,
    legal_counts,
    megatron_schedule_name,
    nearest_legal_counts,
)

from .lifetime import in_flight

__all__ = ["SlotPlan", "plan_all_ranks", "plan_slots"]

_NUM_GROUPS_TO_PROBE = 4


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


# Cached because the command line and every rank of a job ask for the same plans again.
@lru_cache(maxsize=1024)
def _plan(
    name: str, num_ranks: int, num_chunks: int, group_size: int | None, rank: int, cap: int | None
) -> SlotPlan:
    family = get_family(name)
    peaks = [0] * num_chunks
    together = 0
    for count in _counts_to_probe(name, num_ranks, num_chunks, group_size, cap):
        shape = PipelineShape(
            num_ranks=num_ranks,
            num_microbatches=count,
            num_chunks=num_chunks,
            group_size=group_size,
        )
        found = in_flight(
            family.rank_actions(shape, rank), num_ranks=num_ranks, num_chunks=num_chunks
        )
        peaks = [max(pair) for pair in zip(peaks, found.per_chunk, strict=True)]
        together = max(together, found.together)
    return SlotPlan(
        schedule=name,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        group_size=group_size,
        rank=rank,
        slots_per_chunk=tuple(peaks),
        peak_in_flight=together,
        max_num_microbatches=cap,
    )


def _counts_to_probe(
    name: str, num_ranks: int, num_chunks: int, group_size: int | None, cap: int | None
) -> tuple[int, ...]:
    """The microbatch counts that show every peak; see the module's docstring."""
    family = get_family(name)
    if family.interleaves:
        # check_sizes has made sure of a group size; M = 4 G itself adds nothing.
        limit = _NUM_GROUPS_TO_PROBE * (group_size or num_ranks) - 1
    elif family.is_bounded:
        limit = num_ranks
    else:
        limit = cap or 0
    if cap is not None:
        limit = min(limit, cap)
    sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "group_size": group_size}
    counts = legal_counts(limit, **sizes)  # type: ignore[arg-type]
    if not counts:
        nearest = nearest_legal_counts(limit, **sizes)  # type: ignore[arg-type]
        raise TopologyError(
            f"schedule {name!r} with num_ranks {num_ranks}, num_chunks {num_chunks} and group size "
            f"{group_size} has no legal microbatch count up to {cap}; the smallest is {nearest[-1]}"
        )
    if family.interleaves:
        return counts
    # The other families hold no fewer for more microbatches, so the largest count is enough.
    return counts[-1:]

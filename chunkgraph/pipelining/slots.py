"""Count the slots that a schedule of torch needs, from the order of its actions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import Schedule1F1B

from chunkgraph.errors import ConfigError

__all__ = ["ScheduleSlots", "slots_of"]


@dataclass(frozen=True)
class ScheduleSlots:
    """The most microbatches in flight, of a whole pipeline.

    Attributes:
        of_stage: by index of the stage.
        of_rank: of all stages of a rank together, by rank in the pipeline.
        is_split: whether a backward is split into input and weight gradients somewhere.
    """

    of_stage: Mapping[int, int] = field(default_factory=dict)
    of_rank: Mapping[int, int] = field(default_factory=dict)
    is_split: bool = False

    def __or__(self, other: ScheduleSlots) -> ScheduleSlots:
        """Return what both schedules fit into."""
        return ScheduleSlots(
            Counter(self.of_stage) | Counter(other.of_stage),
            Counter(self.of_rank) | Counter(other.of_rank),
            self.is_split or other.is_split,
        )


def slots_of(schedule: Any, num_stages: int, num_microbatches: int) -> ScheduleSlots:
    """Count a schedule's slots, on all ranks.

    A microbatch has its slot from its forward to the end of its backward; where that is split, to
    its weight gradients.

    Args:
        schedule: an object of one of torch's schedule classes.
        num_stages: of the pipeline.
        num_microbatches: of the schedule.

    Raises:
        ConfigError: the schedule does not tell the order of its actions.
    """
    if isinstance(schedule, Schedule1F1B):
        # Its pipeline_order is not what it runs: on the last rank that begins with microbatch 1.
        in_flight = {i: min(num_microbatches, num_stages - i) for i in range(num_stages)}
        return ScheduleSlots(in_flight, in_flight)
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not order:
        raise ConfigError(
            f"{type(schedule).__name__} does not tell the order of its actions (its pipeline_order "
            "is empty), so that the slots cannot be counted. Use a schedule that fills it in, as "
            "torch's own do; one from a CSV file after the file is loaded."
        )
    of_stage: Counter[int] = Counter()
    of_rank = {}
    is_split = False
    for rank, actions in order.items():
        peaks, of_rank[rank], splits = _peaks(actions)
        of_stage |= peaks
        is_split = is_split or splits
    return ScheduleSlots(of_stage, of_rank, is_split)


def _peaks(actions: Iterable[Any]) -> tuple[Counter[int], int, bool]:
    """Return a rank's slots by stage, those of all stages together, and whether it splits."""
    in_flight: dict[int, set[int]] = defaultdict(set)
    peaks: Counter[int] = Counter()
    peak, splits = 0, False
    for kind, stage, microbatch in _computations(actions):
        if kind == "FORWARD":
            in_flight[stage].add(microbatch)
            peaks[stage] = max(peaks[stage], len(in_flight[stage]))
            peak = max(peak, sum(map(len, in_flight.values())))
        elif kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            in_flight[stage].discard(microbatch)
        splits = splits or kind in ("BACKWARD_INPUT", "BACKWARD_WEIGHT")
    return peaks, peak, splits


def _computations(actions: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, stage and microbatch, the forwards of combined actions first."""
    for action in actions:
        if action is None:
            continue
        parts = [
            (part.computation_type.name, part.stage_index, part.microbatch_index)
            for part in getattr(action, "sub_actions", None) or (action,)
        ]
        yield from sorted(parts, key=lambda part: part[0] != "FORWARD")

"""Count the slots that a schedule of torch needs, from the order of its actions."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import Schedule1F1B

from chunkgraph.errors import ConfigError

__all__ = ["ScheduleSlots", "slots_of"]


@dataclass(frozen=True)
class ScheduleSlots:
    """The largest numbers of microbatches in flight in a pipeline.

    Attributes:
        of_stage: Number for each stage, by stage index.
        of_rank: Number for all stages of a rank together, by rank in the pipeline.
        is_split: Whether any backward is split into input and weight gradients.
    """

    of_stage: Mapping[int, int] = field(default_factory=dict)
    of_rank: Mapping[int, int] = field(default_factory=dict)
    is_split: bool = False

    def __or__(self, other: ScheduleSlots) -> ScheduleSlots:
        """Return the slots that fit both schedules."""
        return ScheduleSlots(
            Counter(self.of_stage) | Counter(other.of_stage),
            Counter(self.of_rank) | Counter(other.of_rank),
            self.is_split or other.is_split,
        )


def slots_of(schedule: Any, num_stages: int, num_microbatches: int) -> ScheduleSlots:
    """Count a schedule's slots on all ranks.

    A microbatch holds its slot from its forward to the end of its backward or, if that is split,
    of its weight gradients.

    Args:
        schedule: An object of one of torch's schedule classes.
        num_stages: Number of stages of the pipeline.
        num_microbatches: Number of microbatches of the schedule.

    Raises:
        ConfigError: The schedule does not list its actions, or weight gradients of a stage are not
            in the order of its input gradients.
    """
    if isinstance(schedule, Schedule1F1B):
        # It does not run in pipeline_order, which on the last rank begins with microbatch 1.
        in_flight = {i: min(num_microbatches, num_stages - i) for i in range(num_stages)}
        return ScheduleSlots(in_flight, in_flight)
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not order:
        raise ConfigError(
            f"{type(schedule).__name__} does not list its actions (its pipeline_order is empty), "
            "so the slots cannot be counted. Use a schedule that fills it in, as torch's own do; "
            "load the file of a CSV schedule first."
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
    """Return a rank's slots by stage and in total, and whether a backward is split."""
    in_flight: dict[int, set[int]] = defaultdict(set)
    halved: dict[int, deque[int]] = defaultdict(deque)
    peaks: Counter[int] = Counter()
    peak, splits = 0, False
    for kind, stage, microbatch in _computations(actions):
        if kind == "FORWARD":
            in_flight[stage].add(microbatch)
            peaks[stage] = max(peaks[stage], len(in_flight[stage]))
            peak = max(peak, sum(map(len, in_flight.values())))
        if kind in ("FULL_BACKWARD", "BACKWARD_INPUT"):
            halved[stage].append(microbatch)
        if kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT"):
            _check_order(stage, microbatch, halved[stage])
            halved[stage].popleft()
            in_flight[stage].discard(microbatch)
        splits = splits or kind in ("BACKWARD_INPUT", "BACKWARD_WEIGHT")
    return peaks, peak, splits


def _check_order(stage: int, microbatch: int, halved: Sequence[int]) -> None:
    """Refuse weight gradients out of order, since the order affects the bits of the sums."""
    if halved and halved[0] == microbatch:
        return
    first = f"that of microbatch {halved[0]} comes first" if halved else "it has no input gradient"
    raise ConfigError(
        f"The schedule computes the weight gradient of microbatch {microbatch} on stage {stage}, "
        f"but {first}. Let the weight gradients of a stage follow in the order of its input "
        "gradients, each once."
    )


def _computations(actions: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield kind, stage and microbatch of each computation, forwards of a combined action first."""
    for action in actions:
        if action is None:
            continue
        parts = [
            (part.computation_type.name, part.stage_index, part.microbatch_index)
            for part in getattr(action, "sub_actions", None) or (action,)
        ]
        yield from sorted(parts, key=lambda part: part[0] != "FORWARD")

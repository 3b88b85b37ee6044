"""Count the slots that a schedule of torch needs, from the order of its actions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import Schedule1F1B

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import Action, Op, Schedule, build_schedule, validate
from chunkgraph.slots import in_flight

_OPS = {"FORWARD": Op.F, "FULL_BACKWARD": Op.B, "BACKWARD_INPUT": Op.I, "BACKWARD_WEIGHT": Op.W}


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
        held = {i: min(num_microbatches, num_stages - i) for i in range(num_stages)}
        return ScheduleSlots(held, held)
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not order:
        raise ConfigError(
            f"{type(schedule).__name__} does not list its actions (its pipeline_order is empty), "
            "so the slots cannot be counted. Use a schedule that fills it in, as torch's own do; "
            "load the file of a CSV schedule first."
        )
    slots = ScheduleSlots()
    for rank, row in order.items():
        actions = [*_computations(row)]
        _check_order(actions)
        # As if every stage were a chunk of one rank.
        counts = in_flight(actions, num_ranks=1, num_chunks=num_stages)
        is_split = any(action.op is Op.W for action in actions)
        of_stage = dict(enumerate(counts.per_chunk))
        slots |= ScheduleSlots(of_stage, {rank: counts.together}, is_split)
    return slots


def actions_of(schedule: Any, num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the actions of all ranks of a schedule whose slots were counted.

    Raises:
        ScheduleError: Its stages are not placed in a loop or a V.
    """
    if isinstance(schedule, Schedule1F1B):
        return build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    rows = [[str(action) for action in _computations(order[rank])] for rank in range(num_ranks)]
    name = type(schedule).__name__
    actions = Schedule.from_csv("\n".join(map(",".join, rows)), name=name)
    validate(actions)
    return actions


def _check_order(actions: Iterable[Action]) -> None:
    """Refuse weight gradients out of order, since the order affects the bits of the sums."""
    halved: dict[int, list[int]] = defaultdict(list)
    for action in actions:
        waiting = halved[action.stage]
        if action.op.gives_input_grad:
            waiting.append(action.microbatch)
        if not action.op.ends_lifetime:
            continue
        if waiting[:1] != [action.microbatch]:
            first = f"that of microbatch {waiting[0]} comes first" if waiting else ""
            raise ConfigError(
                f"The schedule computes the weight gradient of microbatch {action.microbatch} on "
                f"stage {action.stage}, but {first or 'it has no input gradient'}. Let the weight "
                "gradients of a stage follow in the order of its input gradients, each once."
            )
        del waiting[0]


def _computations(row: Iterable[Any]) -> Iterator[Action]:
    """Yield the computations of a rank of torch, forwards of a combined action first."""
    for entry in row:
        parts = () if entry is None else getattr(entry, "sub_actions", None) or (entry,)
        for part in sorted(parts, key=lambda part: part.computation_type.name != "FORWARD"):
            op = _OPS.get(part.computation_type.name)
            if op is not None:
                yield Action(op, part.stage_index, part.microbatch_index)

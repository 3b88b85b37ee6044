"""Simulate the timeline of a schedule from the costs of its actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.events import Event, event_of, needs_of, run_in_order
from chunkgraph.schedules.schedule import Schedule
from chunkgraph.schedules.validate import validate


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Duration of one action on one model chunk, in milliseconds.

    The defaults count in forwards: a backward takes two, one for each of its gradients.
    """

    forward_ms: float = 1.0
    """F."""
    backward_ms: float = 2.0
    """B."""
    input_grad_ms: float = 1.0
    """I."""
    weight_grad_ms: float = 1.0
    """W."""
    send_ms: float = 0.0
    """From the end of an action to the arrival of its tensor on another rank."""
    page_out_ms: float = 3.25
    """From a slot to the host, of all that a forward saved (`chunkgraph.slots.plan_pages`)."""
    page_in_ms: float = 3.25
    """Back into a slot."""

    def __post_init__(self) -> None:
        for op in (Op.F, Op.B, Op.I, Op.W):
            if not self.duration_ms(op) > 0:
                raise ScheduleError(
                    f"cost of {op.value} is {self.duration_ms(op)} ms, but must be above 0"
                )
        for name in ("send_ms", "page_out_ms", "page_in_ms"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ScheduleError(f"{name} is {getattr(self, name)}, but must be finite and >= 0")

    def duration_ms(self, op: Op) -> float:
        """Return the duration of a compute operation."""
        costs = (self.forward_ms, self.backward_ms, self.input_grad_ms, self.weight_grad_ms)
        return costs["FBIW".index(op.value)]

    def scaled(self, factor: float) -> CostModel:
        """Return the costs of a chunk ``factor`` times as large, with messages of the same size."""
        return CostModel(
            forward_ms=self.forward_ms * factor,
            backward_ms=self.backward_ms * factor,
            input_grad_ms=self.input_grad_ms * factor,
            weight_grad_ms=self.weight_grad_ms * factor,
            send_ms=self.send_ms,
            page_out_ms=self.page_out_ms * factor,
            page_in_ms=self.page_in_ms * factor,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """One compute action in simulated time."""

    action: Action
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """The timeline of a schedule.

    Attributes:
        schedule: the schedule.
        spans: each rank's compute actions, in order.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_ms(self) -> float:
        """Return the time from the first action's start to the last action's end on any rank."""
        return max((spans[-1].end_ms for spans in self.spans if spans), default=0.0)

    def busy_ms(self, rank: int) -> float:
        """Return the time that a rank computes."""
        return sum(span.end_ms - span.start_ms for span in self.spans[rank])

    def bubble_ratio(self, rank: int) -> float:
        """Return a rank's idle share: ``1 - busy / makespan``, from 0 to 1.

        The Megatron-LM papers divide the idle time by the busy time instead.
        """
        return 1.0 - self.busy_ms(rank) / self.makespan_ms if self.makespan_ms else 0.0


Clock = Callable[[int, float, float], float]
"""Returns when an action starts: from its position on its rank, the earliest start and duration."""


def simulate(
    schedule: Schedule,
    costs: CostModel | Mapping[int, CostModel] | None = None,
    clocks: Mapping[int, Clock] | None = None,
) -> Simulation:
    """Compute the start and end of every compute action.

    Each rank runs its actions in order, each as soon as the rank is free and its inputs exist. A
    tensor reaches another rank ``send_ms`` after the action that produces it.

    Does not model bandwidth and contention, time that sends and receives take on a rank, sends that
    wait for their receives (the schedule's own sends and receives are ignored), embedding, loss and
    optimizer, data-parallel communication, and the host.

    Args:
        schedule: a valid schedule.
        costs: duration of each operation, for all stages or by stage; None: ``CostModel()``.
        clocks: delays of ranks.

    Raises:
        ScheduleError: the schedule is not valid.
    """
    validate(schedule)
    if costs is None or isinstance(costs, CostModel):
        costs = dict.fromkeys(range(schedule.num_stages), costs or CostModel())
    rows = [schedule.compute_actions(rank) for rank in range(schedule.num_ranks)]
    spans: list[list[Span]] = [[] for _ in rows]
    end_ms: dict[Event, float] = {}
    needs = needs_of(schedule, has_communication=False)
    for rank, position, events in run_in_order(rows, needs):
        action = rows[rank][position]
        start = spans[rank][-1].end_ms if position else 0.0
        for event in events:
            stage = event[1]
            send_ms = 0.0 if schedule.rank_of(stage) == rank else costs[stage].send_ms
            start = max(start, end_ms[event] + send_ms)
        duration_ms = costs[action.stage].duration_ms(action.op)
        if clocks is not None and rank in clocks:
            start = clocks[rank](position, start, duration_ms)
        span = Span(action, start, start + duration_ms)
        spans[rank].append(span)
        end_ms[event_of(action)] = span.end_ms
    return Simulation(schedule, tuple(tuple(done) for done in spans))

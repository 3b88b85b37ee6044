"""Plan which microbatches leave their slots for the host, and into which slots they come back.

A chunk may have fewer slots than its schedule has microbatches in flight. Some then have a slot
only around their forward and their backward. In between, what the forward saved is a *page* in host
memory. It leaves once, right after the forward, and comes back into any slot: all are alike.

Time is counted in actions of the rank. A page holds its slot for ``hold`` actions after its
forward. It takes one ``lead`` actions before its backward, or earlier where slots are idle, and
keeps it to the end of the backward (of the weight half, if it is split). Where more slots would be
held than there are, the microbatch whose backward is furthest leaves (Belady): no choice moves
fewer pages. A page waits for nothing but copies and actions of its own rank, so ranks wait for each
other in no cycle that their schedule lacks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from statistics import fmean
from typing import NamedTuple

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import Action, CostModel, Op, Schedule, build_schedule, simulate
from chunkgraph.slots.plan import SlotPlan

_Key = tuple[int, int]
"""Chunk and microbatch."""

_WAYS = tuple(product(range(1, 5), range(5), (0, 1), (0, 8)))
"""How long to hold, to lead at least, which of the furthest leaves, and to lead at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What the forward of one microbatch saved, on its way to the host and back.

    Attributes:
        chunk: Index of the chunk on its rank.
        microbatch: The microbatch.
        forward: Position of its forward among the rank's actions.
        begin: Position of the action before which its copy back is launched.
        backward: Position of its backward, or of the first half.
        place: Number of its buffer on the host, among those of the chunk.
    """

    chunk: int
    microbatch: int
    forward: int
    begin: int
    backward: int
    place: int = 0

    @property
    def key(self) -> _Key:
        """Return chunk and microbatch."""
        return self.chunk, self.microbatch


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """The pages of one rank in one step.

    Attributes:
        actions: The rank's compute actions.
        chunks: Chunk of each action.
        num_slots: Number of slots of each chunk.
        pages: The pages, in the order in which they come back.
        slots: For each chunk and microbatch the slots of its forward and of its backward.
        num_places: Number of buffers on the host, for each chunk.
        delay_ms: Mean delay of the actions, and that of the last one, in a simulation of the rank.
    """

    actions: tuple[Action, ...]
    chunks: tuple[int, ...]
    num_slots: tuple[int, ...]
    pages: tuple[Page, ...] = ()
    slots: Mapping[_Key, tuple[int, int]] = field(default_factory=dict)
    num_places: tuple[int, ...] = ()
    delay_ms: float = 0.0

    def leaving(self) -> dict[int, Page]:
        """Return the page that leaves after the action at a position."""
        return {page.forward: page for page in self.pages}

    def coming(self) -> dict[int, list[Page]]:
        """Return the pages whose copies back are launched before the action at a position."""
        coming: defaultdict[int, list[Page]] = defaultdict(list)
        for page in self.pages:
            coming[page.begin].append(page)
        return coming


@dataclass(frozen=True)
class RankSchedule:
    """The schedule that a rank runs, for any number of microbatches.

    Attributes:
        build: Returns the schedule of a step. The stage of chunk c of a rank is on that rank.
        rank: The rank.
        costs: How long actions and pages take, as far as it is known: for better plans.
    """

    build: Callable[[int], Schedule]
    rank: int
    costs: CostModel = field(default_factory=CostModel)

    @staticmethod
    def of(plan: SlotPlan, rank: int, num_ranks: int, group_size: int | None) -> RankSchedule:
        """Return the schedule for which a rank's slots were planned."""
        sizes = {"num_ranks": num_ranks, "num_chunks": plan.num_chunks, "group_size": group_size}
        return RankSchedule(partial(_built, plan.schedule, sizes), rank)


def split_actions(schedule: Schedule) -> Schedule:
    """Return a schedule of split backwards without whole ones: each becomes its two halves."""
    if not schedule.splits_backward:
        return schedule
    halves = {Op.B: (Op.I, Op.W)}
    rows = tuple(
        tuple(replace(a, op=op) for a in row for op in halves.get(a.op, (a.op,)))
        for row in schedule.actions
    )
    return replace(schedule, actions=rows)


def plan_pages(
    schedule: Schedule,
    rank: int,
    num_slots: Sequence[int],
    costs: CostModel | Mapping[int, CostModel] | None = None,
) -> PagePlan:
    """Plan the pages of one rank in one step.

    Of several ways, take the one that delays actions least in a simulation of the rank, in which
    they wait for other ranks as long as they do without pages.

    Args:
        schedule: A valid schedule.
        rank: The rank.
        num_slots: Number of slots of each of its chunks.
        costs: See `simulate`.

    Raises:
        ConfigError: A chunk has too few slots.
    """
    if not isinstance(costs, Mapping):
        costs = dict.fromkeys(range(schedule.num_stages), costs or CostModel())
    actions, chunks, spans = _spans(schedule, rank)
    plan = PagePlan(actions=actions, chunks=chunks, num_slots=tuple(num_slots))
    starts = [span.start_ms for span in simulate(schedule, costs).spans[rank]]
    seen: set[tuple[Page, ...]] = set()
    plans: list[PagePlan] = []
    for way in _WAYS:
        by_chunk = [
            _pages(own, len(actions), count, *way)
            for own, count in zip(spans, num_slots, strict=True)
        ]
        if None in by_chunk:
            continue
        pages = (page for own in by_chunk for page in own or ())
        ordered = tuple(sorted(pages, key=lambda page: (page.begin, page.backward)))
        if ordered not in seen:
            seen.add(ordered)
            plans.append(_assigned(replace(plan, pages=ordered), costs, starts))
    if not plans:
        raise ConfigError(
            f"rank {rank}: {list(num_slots)} slots are too few for schedule {schedule.name!r} with "
            f"{schedule.num_microbatches} microbatches, whose chunks need at least "
            f"{list(least_slots(schedule, rank))} even if every page leaves. Allow more slots "
            "(max_slots), or more memory for them (max_slot_memory)."
        )
    return min(
        plans,
        key=lambda p: (
            round(p.delay_ms, 6),
            len(p.pages),
            sum(page.begin - page.backward for page in p.pages),
        ),
    )


def least_slots(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the smallest numbers of slots with which the chunks of a rank can run a step."""
    actions, _, spans = _spans(schedule, rank)
    return tuple(
        next(n for n in count(1) if _pages(own, len(actions), n, *_WAYS[0]) is not None)
        for own in spans
    )


class _Span(NamedTuple):
    """The positions of one microbatch of one chunk."""

    chunk: int
    microbatch: int
    forward: int
    backward: int
    last: int


def _spans(
    schedule: Schedule, rank: int
) -> tuple[tuple[Action, ...], tuple[int, ...], list[list[_Span]]]:
    """Return a rank's actions, their chunks, and each chunk's microbatches that have a backward."""
    actions = schedule.compute_actions(rank)
    chunks = tuple(schedule.chunk_of(action.stage) for action in actions)
    places: defaultdict[_Key, list[int]] = defaultdict(list)
    for position, (action, chunk) in enumerate(zip(actions, chunks, strict=True)):
        places[chunk, action.microbatch].append(position)
    spans: list[list[_Span]] = [[] for _ in range(schedule.num_chunks)]
    for (chunk, microbatch), at in places.items():
        if at[1:]:
            spans[chunk].append(_Span(chunk, microbatch, at[0], at[1], at[-1]))
    return actions, chunks, spans


def _pages(  # the numbers of a way
    spans: Sequence[_Span],
    num_actions: int,
    num_slots: int,
    hold: int,
    lead: int,
    skip: int,
    most: int,
) -> list[Page] | None:
    """Return the pages of one chunk; None if the slots are too few."""
    held = [0] * num_actions
    for span in spans:
        for position in range(span.forward, span.last + 1):
            held[position] += 1
    leaving: list[_Span] = []
    alive: list[_Span] = []
    waiting = list(reversed(spans))
    for position in range(num_actions):
        while waiting and waiting[-1].forward + hold < position:
            alive.append(waiting.pop())
        while held[position] > num_slots:
            alive = [span for span in alive if position < span.backward - lead]
            if not alive:
                return None
            alive.sort(key=lambda span: -span.backward)
            span = alive.pop(min(skip, len(alive) - 1))
            leaving.append(span)
            for between in range(span.forward + hold + 1, span.backward - lead):
                held[between] -= 1
    pages: list[Page] = []
    earliest = 0
    for chunk, microbatch, forward, backward, _ in sorted(leaving, key=lambda s: s.backward):
        begin = backward - lead
        while begin > max(forward + hold + 1, earliest, backward - most):
            if held[begin - 1] >= num_slots:
                break
            begin -= 1
            held[begin] += 1
        earliest = begin
        pages.append(
            Page(
                chunk=chunk,
                microbatch=microbatch,
                forward=forward,
                begin=begin,
                backward=backward,
            )
        )
    return pages


class PageClock:
    """Simulate the copies of one rank: one direction at a time each, both at once.

    Args:
        plan: The rank's plan. A microbatch that has no slot yet gets the one that is free first.
        costs: Durations by stage.

    Attributes:
        slots: See `PagePlan`.
    """

    def __init__(self, plan: PagePlan, costs: Mapping[int, CostModel]) -> None:
        self._plan, self._costs = plan, costs
        self._leaving, self._coming = plan.leaving(), plan.coming()
        self._paged = {page.key for page in plan.pages}
        self._free_ms = [dict.fromkeys(range(n), 0.0) for n in plan.num_slots]  # of free slots
        self._out_ms = self._in_ms = 0.0  # when each direction is idle
        self._saved_ms: dict[_Key, float] = {}
        self._back_ms: dict[_Key, float] = {}
        self._num_left = defaultdict[_Key, int](int)
        for action, chunk in zip(plan.actions, plan.chunks, strict=True):
            self._num_left[chunk, action.microbatch] += 1
        self.slots = {key: list(places) for key, places in plan.slots.items()}

    def start_ms(self, position: int, earliest_ms: float) -> float:
        """Return when the action at a position can start, at ``earliest_ms`` or later.

        Args:
            position: Each from 0 on, in order.
            earliest_ms: When its inputs exist and the action before it has ended.
        """
        action, chunk = self._plan.actions[position], self._plan.chunks[position]
        now = self._end_ms if position else 0.0
        for page in self._coming.get(position, ()):
            key = page.key
            free_ms = self._take(key, 1)
            begin = max(now, free_ms, self._in_ms, self._saved_ms[key])
            self._in_ms = begin + self._cost(page).page_in_ms
            self._back_ms[key] = self._in_ms
        key = chunk, action.microbatch
        if action.op is Op.F:
            return max(earliest_ms, self._take(key, 0))
        return max(earliest_ms, self._back_ms.get(key, 0.0))

    def ended(self, position: int, end_ms: float) -> None:
        """Note that the action at a position has ended."""
        self._end_ms = end_ms
        action, chunk = self._plan.actions[position], self._plan.chunks[position]
        key = chunk, action.microbatch
        self._num_left[key] -= 1
        page = self._leaving.get(position)
        if page is not None:
            begin = max(end_ms, self._out_ms)
            self._out_ms = self._saved_ms[key] = begin + self._cost(page).page_out_ms
            self._free_ms[chunk][self.slots[key][0]] = self._out_ms
        elif not self._num_left[key]:
            self._free_ms[chunk][self.slots[key][1]] = end_ms

    def _cost(self, page: Page) -> CostModel:
        return self._costs[self._plan.actions[page.forward].stage]

    def _take(self, key: _Key, which: int) -> float:
        """Give a microbatch its slot; return when it is free."""
        free = self._free_ms[key[0]]
        if key not in self.slots or len(self.slots[key]) <= which:
            slot = min(free, key=lambda slot: (free[slot], slot))
            of_page = key in self._paged
            self.slots.setdefault(key, []).extend([slot] if of_page else [slot, slot])
        return free.pop(self.slots[key][which])


def _assigned(plan: PagePlan, costs: Mapping[int, CostModel], starts: Sequence[float]) -> PagePlan:
    """Return the plan with slots, buffers on the host, and its delay."""
    clock = PageClock(plan, costs)
    end_ms = 0.0
    delays: list[float] = []
    for position, action in enumerate(plan.actions):
        start = clock.start_ms(position, max(end_ms, starts[position]))
        delays.append(start - starts[position])
        end_ms = start + costs[action.stage].duration_ms(action.op)
        clock.ended(position, end_ms)
    num_places = [0] * len(plan.num_slots)
    busy: list[list[int]] = [[] for _ in plan.num_slots]  # last positions by place
    places: dict[_Key, int] = {}
    for page in sorted(plan.pages, key=lambda page: page.forward):
        ends = busy[page.chunk]
        place = next((i for i, end in enumerate(ends) if end < page.forward), len(ends))
        ends[place : place + 1] = [page.backward]
        places[page.key] = place
        num_places[page.chunk] = len(ends)
    return replace(
        plan,
        pages=tuple(replace(p, place=places[p.key]) for p in plan.pages),
        slots={key: (slots[0], slots[1]) for key, slots in clock.slots.items()},
        num_places=tuple(num_places),
        delay_ms=fmean(delays) + delays[-1],
    )


def _built(name: str, sizes: Mapping[str, int | None], num_microbatches: int) -> Schedule:
    return build_schedule(name, num_microbatches=num_microbatches, **sizes)  # type: ignore[arg-type]

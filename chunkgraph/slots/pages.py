"""Plan which microbatches leave their slots for the host, and into which slots they come back.

A chunk may have fewer slots than its schedule has microbatches in flight. Some then have a slot
only around their forward and their backward. In between, what the forward saved is a *page* in host
memory. It leaves once, right after the forward, and comes back into any slot: all are alike.

Which microbatches leave is a search: from all, none and some of them, one or two are changed at a
time, as long as simulated copies delay the rank less, or fewer are needed. A page comes back as
early as slots are idle, in the order of backwards, and keeps its slot to the end of its backward
(of the weight half, if it is split). It waits for nothing but copies and actions of its own rank,
so ranks wait for each other in no cycle that their schedule lacks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from heapq import heappop, heappush
from itertools import accumulate
from math import inf
from statistics import fmean

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import Action, CostModel, Op, Schedule, Span, build_schedule, simulate
from chunkgraph.slots.plan import SlotPlan

_Key = tuple[int, int]
"""Chunk and microbatch."""
_Positions = Mapping[_Key, Sequence[int]]
"""Positions of the actions of each microbatch."""
_MOST = 400
"""How many sets of pages are tried until the last round of changes begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What the forward of one microbatch saved, on its way to the host and back.

    Attributes:
        key: Index of the chunk on its rank, and the microbatch.
        forward: Position of its forward among the rank's actions.
        begin: Position of the action before which its copy back is launched.
        backward: Position of its backward, or of the first half.
    """

    key: _Key
    forward: int
    begin: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """The pages of one rank in one step.

    Attributes:
        actions: The rank's compute actions.
        keys: Chunk and microbatch of each.
        num_slots: Number of slots of each chunk; None for a chunk without pages.
        pages: The pages, in the order in which they come back.
    """

    actions: tuple[Action, ...]
    keys: tuple[_Key, ...]
    num_slots: tuple[int | None, ...]
    pages: tuple[Page, ...]

    @cached_property
    def num_buffers(self) -> tuple[int, ...]:
        """Return the largest number of pages of each chunk that are on the host at once."""
        away: list[list[tuple[int, int]]] = [[] for _ in self.num_slots]
        for page in self.pages:
            away[page.key[0]].append((page.forward, page.backward))
        return tuple(map(_most_together, away))

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
    def of(plan: SlotPlan) -> RankSchedule:
        """Return the schedule for which a rank's slots were planned."""
        build = partial(
            build_schedule,
            plan.schedule,
            num_ranks=plan.num_ranks,
            num_chunks=plan.num_chunks,
            group_size=plan.group_size,
        )
        return RankSchedule(lambda count: build(num_microbatches=count), plan.rank)


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
    num_slots: Sequence[int | None],
    costs: CostModel | None = None,
) -> PagePlan:
    """Plan the pages of one rank in one step.

    Args:
        schedule: A valid schedule.
        rank: The rank.
        num_slots: Number of slots of each of its chunks; None for a chunk without pages.
        costs: Mean durations of the rank's actions and copies.

    Raises:
        ConfigError: A chunk has too few slots.
    """
    least_slots(schedule, rank, num_slots)
    actions, costs = schedule.compute_actions(rank), costs or CostModel()
    keys = tuple((schedule.chunk_of(action.stage), action.microbatch) for action in actions)
    positions = {
        key: at for key, at in _positions(schedule, rank).items() if num_slots[key[0]] is not None
    }
    spans = simulate(schedule, costs).spans[rank]

    plan = partial(PagePlan, actions=actions, keys=keys, num_slots=tuple(num_slots))

    @cache
    def cost_of(leaving: frozenset[_Key]) -> tuple[float, int]:
        pages = _pages(positions, num_slots, leaving)
        delay_ms = inf if pages is None else _delay_ms(plan(pages=pages), costs, spans)
        return delay_ms, len(leaving)

    able = {key for key, at in positions.items() if at[1] > at[0] + 1}
    pairs = ({key, (key[0], key[1] + far)} for key in sorted(able) for far in range(3))
    moves = [pair for pair in pairs if pair <= able]
    starts = [frozenset(key for key in able if key[1] % 3 >= stays) for stays in range(4)]
    best = min(starts, key=cost_of)
    for start in sorted(starts, key=cost_of):
        before, leaving = None, start
        while before != leaving and cost_of(best) > (0, 0) and cost_of.cache_info().misses < _MOST:
            before = leaving
            for move in moves:
                leaving = min(leaving, leaving ^ move, key=cost_of)
        best = min(best, leaving, key=cost_of)
    return plan(pages=_pages(positions, num_slots, best) or ())


def least_slots(
    schedule: Schedule, rank: int, num_slots: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Return the smallest numbers of slots with which the chunks of a rank can run a step.

    Args:
        schedule: A valid schedule.
        rank: The rank.
        num_slots: See `plan_pages`; those that there are.

    Raises:
        ConfigError: A chunk has fewer slots.
    """
    stays: list[list[tuple[int, int]]] = [[] for _ in range(schedule.num_chunks)]
    for (c, _), (forward, backward, *last) in _positions(schedule, rank).items():
        stays[c] += [(forward, min(forward + 1, backward - 1)), (backward, max((backward, *last)))]
    least = tuple(map(_most_together, stays))
    pairs = zip(least if num_slots is None else num_slots, least, strict=True)
    if any(count is not None and count < needed for count, needed in pairs):
        raise ConfigError(
            f"rank {rank}: {list(num_slots or ())} slots are too few for schedule "
            f"{schedule.name!r} with {schedule.num_microbatches} microbatches, whose chunks need "
            f"at least {list(least)} even if every page leaves (a split backward keeps its slot "
            "between its halves). Allow more slots (max_slots, --slots), or more memory for them "
            "(max_slot_memory)."
        )
    return least


class PageClock:
    """Simulate the copies of one rank: one direction at a time each, both at once.

    Args:
        plan: The rank's plan.
        costs: Durations of its copies.
    """

    def __init__(self, plan: PagePlan, costs: CostModel) -> None:
        self._plan, self._costs = plan, costs
        self._leaving, self._coming = plan.leaving(), plan.coming()
        # When each free slot is saved, when each direction and the rank are idle, and when pages
        # are on the host, then in a slot.
        self._free_ms = [[0.0] * (count or len(plan.actions)) for count in plan.num_slots]
        self._out_ms = self._in_ms = self._end_ms = 0.0
        self._page_ms: dict[_Key, float] = {}

    def __call__(self, position: int, earliest_ms: float, duration_ms: float) -> float:
        """Return when the next action starts, as `simulate` asks for it."""
        action, key = self._plan.actions[position], self._plan.keys[position]
        for page in self._coming.get(position, ()):
            free_ms = heappop(self._free_ms[page.key[0]])
            begin = max(self._end_ms, self._in_ms, self._page_ms[page.key], free_ms)
            self._in_ms = self._page_ms[page.key] = begin + self._costs.page_in_ms
        free = self._free_ms[key[0]]
        ready_ms = heappop(free) if action.op is Op.F else self._page_ms.get(key, 0.0)
        start = max(earliest_ms, ready_ms)
        self._end_ms = start + duration_ms
        if position in self._leaving:
            self._out_ms = max(self._end_ms, self._out_ms) + self._costs.page_out_ms
            self._page_ms[key] = self._out_ms
            heappush(free, self._out_ms)
        elif action.op.ends_lifetime:
            heappush(free, self._end_ms)
        return start


def _positions(schedule: Schedule, rank: int) -> dict[_Key, list[int]]:
    """Return the positions of the actions of each chunk and microbatch of a rank."""
    positions: defaultdict[_Key, list[int]] = defaultdict(list)
    for position, action in enumerate(schedule.compute_actions(rank)):
        positions[schedule.chunk_of(action.stage), action.microbatch].append(position)
    return positions


def _pages(
    positions: _Positions, num_slots: Sequence[int | None], leaving: frozenset[_Key]
) -> tuple[Page, ...] | None:
    """Return the pages of microbatches that leave; None if the slots are too few."""
    last = max((at[-1] for at in positions.values()), default=0)
    most = [count or 0 for count in num_slots]  # others hold none
    for hold in (2, 1):  # the second if needed
        changes = [[0] * (last + 2) for _ in num_slots]
        for key, at in positions.items():
            is_away = key in leaving and at[0] + hold < at[1]
            stays = ((at[0], at[0] + hold), (at[1], at[-1])) if is_away else ((at[0], at[-1]),)
            for begin, end in stays:
                changes[key[0]][begin] += 1
                changes[key[0]][end + 1] -= 1
        held = [list(accumulate(of_chunk)) for of_chunk in changes]
        if any(max(of_chunk) > most[c] for c, of_chunk in enumerate(held)):
            continue
        pages, earliest = list[Page](), Counter[int]()
        for key in sorted(leaving, key=lambda key: positions[key][1]):
            c, (forward, backward, *_) = key[0], positions[key]
            begin, earliest[c] = backward, max(earliest[c], forward + hold + 1)
            while begin > earliest[c] and held[c][begin - 1] < most[c]:
                begin -= 1
                held[c][begin] += 1
            earliest[c] = begin
            pages.append(Page(key=key, forward=forward, begin=begin, backward=backward))
        return tuple(sorted(pages, key=lambda page: (page.begin, page.backward)))
    return None


def _delay_ms(plan: PagePlan, costs: CostModel, spans: Sequence[Span]) -> float:
    """Return how much later actions start than without pages: the last one, and twice the mean."""
    clock, end_ms = PageClock(plan, costs), 0.0
    delays: list[float] = []
    for position, span in enumerate(spans):
        duration_ms = span.end_ms - span.start_ms
        start = clock(position, max(end_ms, span.start_ms), duration_ms)
        delays.append(start - span.start_ms)
        end_ms = start + duration_ms
    return round(delays[-1] + 2 * fmean(delays), 6) if delays else 0.0


def _most_together(stays: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of stays that hold one position."""
    held = Counter(position for first, last in stays for position in range(first, last + 1))
    return max(held.values(), default=0)

"""Plan which microbatches leave their slots for the host, and into which slots they come back.

A chunk may have fewer slots than its schedule has microbatches in flight. Some then have a slot
only around their forward and their backward. In between, what the forward saved is a *page* in host
memory. It leaves once, right after the forward, and comes back into any slot: all are alike.

Time is counted in actions of the rank. A page holds its slot for ``hold`` actions after its
forward. It takes one ``lead`` actions before its backward, or earlier where slots are idle, and
keeps it to the end of the backward (of the weight half, if it is split). Both are as long as a copy
takes, or shorter if slots are few. Where more slots would be held than there are, the microbatch
whose backward is furthest leaves (Belady): no choice moves fewer pages. A page waits for nothing
but copies and actions of its own rank, so ranks wait for each other in no cycle that their schedule
lacks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from math import ceil
from statistics import fmean

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import Action, CostModel, Op, Schedule, build_schedule
from chunkgraph.slots.plan import SlotPlan

_Key = tuple[int, int]
"""Chunk and microbatch."""

_LONGEST = 8
"""Most actions for which a slot is held after a forward, or taken before a backward."""


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
    actions, costs = schedule.compute_actions(rank), costs or CostModel()
    mean_ms = fmean(costs.duration_ms(action.op) for action in actions)
    hold, lead = (ceil(ms / mean_ms) for ms in (costs.page_out_ms, costs.page_in_ms))
    ways = [(max(1, min(hold, most)), min(lead, most)) for most in range(_LONGEST, -1, -1)]
    pages: list[Page] = []
    for c, count in enumerate(num_slots):
        if count is None:
            continue
        own = {key: at for key, at in _positions(schedule, rank).items() if key[0] == c}
        found = (_pages(own, count, *way) for way in ways)
        of_chunk = next((pages for pages in found if pages is not None), None)
        if of_chunk is None:
            raise ConfigError(
                f"rank {rank}: {list(num_slots)} slots are too few for schedule {schedule.name!r} "
                f"with {schedule.num_microbatches} microbatches, whose chunks need at least "
                f"{list(least_slots(schedule, rank))} even if every page leaves. Allow more slots "
                "(max_slots, --slots), or more memory for them (max_slot_memory)."
            )
        pages += of_chunk
    pages.sort(key=lambda page: (page.begin, page.backward))
    keys = tuple((schedule.chunk_of(action.stage), action.microbatch) for action in actions)
    return PagePlan(actions=actions, keys=keys, num_slots=tuple(num_slots), pages=tuple(pages))


def least_slots(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the smallest numbers of slots with which the chunks of a rank can run a step."""
    stays: list[list[tuple[int, int]]] = [[] for _ in range(schedule.num_chunks)]
    for (c, _), (forward, backward, *last) in _positions(schedule, rank).items():
        stays[c] += [(forward, min(forward + 1, backward - 1)), (backward, max((backward, *last)))]
    return tuple(map(_most_together, stays))


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
    positions: Mapping[_Key, Sequence[int]], num_slots: int, hold: int, lead: int
) -> list[Page] | None:
    """Return the pages of a chunk; None if the slots are too few."""
    held = Counter(p for at in positions.values() for p in range(at[0], at[-1] + 1))
    leaving: dict[_Key, Sequence[int]] = {}
    for position in sorted(held):
        while held[position] > num_slots:
            others = [
                (at[1], key)
                for key, at in positions.items()
                if key not in leaving and at[0] + hold < position < at[1] - lead
            ]
            if not others:
                return None
            backward, key = max(others)
            leaving[key] = at = positions[key]
            held.subtract(range(at[0] + hold + 1, backward - lead))
    pages: list[Page] = []
    earliest = 0
    for key, (forward, backward, *_) in sorted(leaving.items(), key=lambda item: item[1][1]):
        earliest, begin = max(earliest, forward + hold + 1), backward - lead
        while begin > earliest and held[begin - 1] < num_slots:
            begin -= 1
            held[begin] += 1
        earliest = begin
        pages.append(Page(key=key, forward=forward, begin=begin, backward=backward))
    return pages


def _most_together(stays: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of stays that hold one position."""
    held = Counter(position for first, last in stays for position in range(first, last + 1))
    return max(held.values(), default=0)

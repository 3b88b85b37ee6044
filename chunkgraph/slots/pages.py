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
from functools import partial
from math import ceil
from statistics import fmean
from typing import Any

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
        place: Number of its buffer on the host, among those of the chunk.
    """

    key: _Key
    forward: int
    begin: int
    backward: int
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class PagePlan:
    """The pages of one rank in one step.

    Attributes:
        actions: The rank's compute actions.
        keys: Chunk and microbatch of each.
        pages: The pages, in the order in which they come back.
        slots: For each chunk and microbatch the slots of its forward and of its backward.
    """

    actions: tuple[Action, ...]
    keys: tuple[_Key, ...]
    pages: tuple[Page, ...]
    slots: Mapping[_Key, tuple[int, int]]

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
    slots: dict[_Key, tuple[int, int]] = {}
    for c, count in enumerate(num_slots):
        if count is None:
            continue
        own = {key: at for key, at in _positions(schedule, rank).items() if key[0] == c}
        stays = next(filter(None, (_stays(own, count, *way) for way in ways)), None)
        if stays is None:
            raise ConfigError(
                f"rank {rank}: {list(num_slots)} slots are too few for schedule {schedule.name!r} "
                f"with {schedule.num_microbatches} microbatches, whose chunks need at least "
                f"{list(least_slots(schedule, rank))} even if every page leaves. Allow more slots "
                "(max_slots), or more memory for them (max_slot_memory)."
            )
        numbers = _numbers(stays, count)
        slots |= {key: (numbers[key, 0], numbers.get((key, 1), numbers[key, 0])) for key in own}
        away = {key: (at[0], at[1]) for key, at in own.items() if (key, 1) in stays}
        places = _numbers(away, _most_together(away.values()))
        pages += [
            Page(key=key, forward=first, begin=stays[key, 1][0], backward=last, place=places[key])
            for key, (first, last) in away.items()
        ]
    pages.sort(key=lambda page: (page.begin, page.backward))
    keys = tuple((schedule.chunk_of(action.stage), action.microbatch) for action in actions)
    return PagePlan(actions=actions, keys=keys, pages=tuple(pages), slots=slots)


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
        self._out_ms = self._in_ms = self._end_ms = 0.0  # when each direction and the rank is idle
        self._saved_ms: defaultdict[_Key, float] = defaultdict(float)  # by chunk and slot
        self._page_ms: defaultdict[_Key, float] = defaultdict(float)  # on the host, then back

    def __call__(self, position: int, earliest_ms: float, duration_ms: float) -> float:
        """Return when the next action starts, as `simulate` asks for it."""
        plan, key = self._plan, self._plan.keys[position]
        for page in self._coming.get(position, ()):
            slot = page.key[0], plan.slots[page.key][1]
            begin = max(self._end_ms, self._in_ms, self._page_ms[page.key], self._saved_ms[slot])
            self._in_ms = self._page_ms[page.key] = begin + self._costs.page_in_ms
        slot = key[0], plan.slots[key][0] if key in plan.slots else -1
        is_forward = plan.actions[position].op is Op.F
        start = max(earliest_ms, self._saved_ms[slot] if is_forward else self._page_ms[key])
        self._end_ms = start + duration_ms
        if position in self._leaving:
            self._out_ms = max(self._end_ms, self._out_ms) + self._costs.page_out_ms
            self._page_ms[key] = self._saved_ms[slot] = self._out_ms
        return start


def _positions(schedule: Schedule, rank: int) -> dict[_Key, list[int]]:
    """Return the positions of the actions of each chunk and microbatch of a rank."""
    positions: defaultdict[_Key, list[int]] = defaultdict(list)
    for position, action in enumerate(schedule.compute_actions(rank)):
        positions[schedule.chunk_of(action.stage), action.microbatch].append(position)
    return positions


def _stays(
    positions: Mapping[_Key, Sequence[int]], num_slots: int, hold: int, lead: int
) -> dict[tuple[_Key, int], tuple[int, int]] | None:
    """Return from where to where each microbatch of a chunk has a slot; None if they are too few.

    A microbatch whose page leaves has a first and a second stay, 0 and 1.
    """
    held = Counter(p for at in positions.values() for p in range(at[0], at[-1] + 1))
    begins: dict[_Key, int] = {}
    for position in sorted(held):
        while held[position] > num_slots:
            others = [
                (at[1], key)
                for key, at in positions.items()
                if key not in begins and at[0] + hold < position < at[1] - lead
            ]
            if not others:
                return None
            backward, key = max(others)
            begins[key] = backward - lead
            held.subtract(range(positions[key][0] + hold + 1, backward - lead))
    stays = {(key, 0): (at[0], at[-1]) for key, at in positions.items()}
    earliest = 0
    for key in sorted(begins, key=lambda key: positions[key][1]):
        forward, *_, last = positions[key]
        earliest, begin = max(earliest, forward + hold + 1), begins[key]
        while begin > earliest and held[begin - 1] < num_slots:
            begin -= 1
            held[begin] += 1
        earliest = begin
        stays[key, 0], stays[key, 1] = (forward, forward + hold), (begin, last)
    return stays


def _numbers(stays: Mapping[Any, tuple[int, int]], count: int) -> dict[Any, int]:
    """Number stays, of a first and a last position, below ``count``: the longest free one each."""
    ends = [-1] * count
    numbers: dict[Any, int] = {}
    for key, (first, last) in sorted(stays.items(), key=lambda item: item[1]):
        numbers[key] = number = min(range(count), key=ends.__getitem__)
        assert ends[number] < first
        ends[number] = last
    return numbers


def _most_together(stays: Iterable[tuple[int, int]]) -> int:
    """Return the largest number of stays that hold one position."""
    held = Counter(position for first, last in stays for position in range(first, last + 1))
    return max(held.values(), default=0)

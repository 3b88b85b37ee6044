"""Plans of pages: nothing is overwritten before it was saved, and no rank waits in a cycle."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from drawn_schedules import legal_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import ConfigError
from chunkgraph.schedules import (
    CostModel,
    Op,
    Schedule,
    build_schedule,
    list_schedules,
    simulate,
)
from chunkgraph.schedules.events import event_of, needs_of
from chunkgraph.slots import (
    PageClock,
    PagePlan,
    least_slots,
    plan_pages,
    plan_schedule,
    split_actions,
)

SLOW = CostModel(page_out_ms=5.0, page_in_ms=7.0)
INSTANT = CostModel(page_out_ms=0.0, page_in_ms=0.0)


def assigned(plan: PagePlan) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """Return the slots of each microbatch and the buffer of each page: the lowest free ones."""
    free = [[*range(count)] for count in plan.num_slots if count is not None]
    idle = [[*range(count)] for count in plan.num_buffers]
    slots: defaultdict[Any, list[int]] = defaultdict(list)
    buffers: dict[Any, int] = {}
    leaving, coming = plan.leaving(), plan.coming()
    for position, (action, key) in enumerate(zip(plan.actions, plan.keys, strict=True)):
        new = [page.key for page in coming.get(position, ())]
        for c, microbatch in [*new, *([key] if action.op is Op.F else [])]:
            slots[c, microbatch].append(min(free[c]))
            free[c].remove(min(free[c]))
        if position in leaving:
            buffers[key] = min(idle[key[0]])
            idle[key[0]].remove(buffers[key])
        elif key in buffers and action.op is not Op.W:
            idle[key[0]].append(buffers[key])
        if position in leaving or action.op.ends_lifetime:
            free[key[0]].append(slots[key][-1])
    return slots, buffers


def check_memory(plan: PagePlan, *, is_late: bool) -> None:
    """Run a plan on symbolic memory, with every copy as late as it may run, or at once."""
    slots: dict[tuple[int, int], object] = {}  # what each slot holds
    host: dict[object, object] = {}
    late: dict[object, tuple] = {}  # copies that were launched, in order
    out_of: dict[tuple[int, int], object] = {}  # the copy that each slot waits for

    def run(copy: object) -> None:
        if copy not in late:
            return
        source, target, memory, before = late.pop(copy)
        for other in before:
            run(other)
        memory[1][target] = memory[0][source]
        if memory[1] is host:
            memory[0][source] = "poison"

    leaving, coming = plan.leaving(), plan.coming()
    slots_of, buffers = assigned(plan)
    for position, (action, key) in enumerate(zip(plan.actions, plan.keys, strict=True)):
        chunk = key[0]
        forward_slot, backward_slot = slots_of[key][0], slots_of[key][-1]
        for page in coming.get(position, ()):
            of_page = page.key
            slot = page.key[0], slots_of[of_page][1]
            before = [("out", of_page), *([out_of.pop(slot)] if slot in out_of else [])]
            place = "host", page.key[0], buffers[page.key]
            late["in", of_page] = place, slot, (host, slots), before
            if not is_late:
                run(("in", of_page))
        if action.op is Op.F:
            slot = chunk, forward_slot
            run(out_of.pop(slot, None))
            assert slots.get(slot) in (None, "poison"), "the slot is in use"
            assert not any(c[1] == slot for c in late.values()), "a copy will overwrite it"
            slots[slot] = key
            if position in leaving:
                page = leaving[position]
                assert ("out", key) not in late
                place = "host", chunk, buffers[page.key]
                assert not any(c[0] == place for n, c in late.items() if n[0] == "in")
                late["out", key] = slot, place, (slots, host), []
                out_of[slot] = "out", key
                if not is_late:
                    run(("out", key))
        else:
            run(("in", key))
            assert slots[chunk, backward_slot] == key, "the slot holds something else"
            if action.op.ends_lifetime:
                slots[chunk, backward_slot] = None
    assert not any(slots.values()) or set(slots.values()) <= {None, "poison"}
    assert not any(name[0] == "in" for name in late)


def check_no_cycle(schedule: Schedule, plans: list[PagePlan]) -> None:
    """Build the graph of all that waits for something, and run it to the end."""
    needs = needs_of(schedule, has_communication=False)
    waits: dict[object, set[object]] = {}
    for rank, plan in enumerate(plans):
        coming, leaving = plan.coming(), plan.leaving()
        slots_of, _ = assigned(plan)
        users: defaultdict[tuple[int, int], list[object]] = defaultdict(list)
        last: dict[str, object] = {}
        for position, (action, key) in enumerate(zip(plan.actions, plan.keys, strict=True)):
            chunk = key[0]
            me = event_of(action)
            waits[me] = {*needs(action), *([last["run"]] if "run" in last else [])}
            for page in coming.get(position, ()):
                of_page = page.key
                copy = "in", rank, *of_page
                slot = page.key[0], slots_of[of_page][1]
                waits[copy] = {("out", rank, *of_page), *users[slot], last["run"]}
                waits[copy] |= {last["in"]} if "in" in last else set()
                users[slot], last["in"] = [copy], copy
                waits["arrived", rank, *of_page] = {copy}
            if action.op is Op.F:
                waits[me] |= set(users[chunk, slots_of[key][0]])
                users[chunk, slots_of[key][0]] = [me]
            elif ("arrived", rank, *key) in waits:
                waits[me].add(("arrived", rank, *key))
            if action.op.ends_lifetime:
                users[chunk, slots_of[key][-1]] = [me]
            last["run"] = me
            if position in leaving:
                copy = "out", rank, *key
                waits[copy] = {me, *([last["out"]] if "out" in last else [])}
                users[chunk, slots_of[key][0]] = [copy]
                last["out"] = copy
    done: set[object] = set()
    while ready := [event for event, before in waits.items() if before <= done]:
        done.update(ready)
        for event in ready:
            del waits[event]
    assert not waits


def check(schedule: Schedule, counts_of_rank: list[tuple[int, ...]], costs: CostModel) -> None:
    plans = []
    for rank, counts in enumerate(counts_of_rank):
        plan = plan_pages(schedule, rank, counts, costs)
        check_memory(plan, is_late=True)
        check_memory(plan, is_late=False)
        for page in plan.pages:
            assert page.forward + 1 < page.begin <= page.backward
        assert plan.num_slots == counts
        plans.append(plan)
    check_no_cycle(schedule, plans)
    clocks = {rank: PageClock(plan, costs) for rank, plan in enumerate(plans)}
    paged, plain = simulate(schedule, costs, clocks), simulate(schedule, costs)
    assert paged.makespan_ms >= plain.makespan_ms - 1e-9


@given(legal_steps(), st.data())
@settings(max_examples=30, deadline=None)
def test_any_schedule_with_any_number_of_slots(step: tuple, data: st.DataObject) -> None:
    name, sizes, count = step
    schedule = build_schedule(name, num_microbatches=count, **sizes)
    schedule = data.draw(st.sampled_from([schedule, split_actions(schedule)]))
    counts = []
    for rank in range(schedule.num_ranks):
        most = plan_schedule(schedule, rank).slots_per_chunk
        pairs = zip(least_slots(schedule, rank), most, strict=True)
        counts.append(tuple(data.draw(st.integers(low, max(low, high))) for low, high in pairs))
    check(schedule, counts, data.draw(st.sampled_from([CostModel(), SLOW, INSTANT])))


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_two_slots_are_enough_for_schedules_of_whole_backwards(num_ranks: int) -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("gpipe", 1)):
        schedule = build_schedule(
            name, num_ranks=num_ranks, num_chunks=chunks, num_microbatches=2 * num_ranks
        )
        for rank in range(num_ranks):
            least = least_slots(schedule, rank)
            assert max(least) <= 2
            with pytest.raises(ConfigError, match="at least"):
                plan_pages(schedule, rank, [n - 1 for n in least])


def test_split_backwards_hold_their_slots_between_their_halves() -> None:
    """What W needs stays: zb-h1 delays the weight gradients of a rank by as many microbatches."""
    least = {
        name: [
            max(least_slots(build_schedule(name, num_microbatches=16, **sizes), rank))
            for rank in range(4)
        ]
        for name, sizes in {
            "zb-h1": {"num_ranks": 4},
            "interleaved-zb": {"num_ranks": 4, "num_chunks": 2},
            "zb-v": {"num_ranks": 4, "num_chunks": 2},
            "dualpipe-v": {"num_ranks": 4, "num_chunks": 2},
        }.items()
    }
    assert set(least) < set(list_schedules())
    for counts in least.values():
        assert max(counts) <= 5


def test_as_few_pages_move_as_possible() -> None:
    """In 1F1B, every full turn of the slots moves one page for each slot that lacks."""
    for num_slots in (2, 3, 5, 7):
        schedule = build_schedule("1f1b", num_ranks=8, num_microbatches=32)
        plan = plan_pages(schedule, 0, [num_slots], INSTANT)
        # Between a forward and its backward, each page saves a slot for 13 of 15 actions at most.
        held = 8 - num_slots
        assert held * 32 / 8 * 0.5 <= len(plan.pages) <= held * 32 / 6
    whole = plan_pages(build_schedule("1f1b", num_ranks=8, num_microbatches=32), 0, [8])
    assert not whole.pages


def test_the_link_decides_when_a_page_comes_back() -> None:
    schedule = build_schedule("1f1b", num_ranks=8, num_microbatches=16)
    ends = []
    for factor in (0.0, 0.25, 1.0, 4.0):
        costs = CostModel(page_out_ms=3.75 * factor, page_in_ms=4.8 * factor)
        plan = plan_pages(schedule, 0, [6], costs)
        clock = {0: PageClock(plan, costs)}
        ends.append(simulate(schedule, costs, clock).makespan_ms)
        lead = sum(page.backward - page.begin for page in plan.pages)
        assert lead >= len(plan.pages) * bool(factor)
    assert ends[0] == simulate(schedule).makespan_ms
    assert all(a <= b for a, b in pairwise(ends))
    assert ends[2] <= 1.15 * ends[0]


@pytest.mark.parametrize(
    ("num_slots", "most"), [(7, 1.02), (6, 1.14), (5, 1.39), (4, 1.65), (3, 2.0)]
)
def test_a_rank_that_only_waits_for_its_pages(num_slots: int, most: float) -> None:
    """The ratios that an annealing search finds for these times, or a little more."""
    actions = build_schedule("1f1b", num_ranks=8, num_microbatches=16).compute_actions(0)
    alone = Schedule("first of eight", 1, 1, 16, None, (actions,))
    costs = CostModel(page_out_ms=3.75, page_in_ms=4.78)
    plan = plan_pages(alone, 0, [num_slots], costs)
    paged = simulate(alone, costs, {0: PageClock(plan, costs)})
    assert paged.makespan_ms <= most * simulate(alone, costs).makespan_ms


def test_a_plan_repeats_itself() -> None:
    schedule = build_schedule("interleaved", num_ranks=4, num_chunks=2, num_microbatches=12)
    assert plan_pages(schedule, 1, [3, 3]) == plan_pages(schedule, 1, [3, 3])

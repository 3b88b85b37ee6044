"""A schedule's closed forms equal the numbers from counting and simulating."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from drawn_schedules import legal_steps
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkgraph.errors import ScheduleError
from chunkgraph.schedules import (
    CostModel,
    InFlight,
    PipelineShape,
    build_schedule,
    check_step,
    draw_svg,
    get_family,
    legal_counts,
    list_schedules,
    megatron_schedule,
    read_schedule,
    simulate,
)
from chunkgraph.slots import assign_slots, in_flight


def _checked(case: tuple[str, dict[str, int], int]) -> tuple[str, PipelineShape]:
    name, sizes, count = case
    return name, check_step(name, num_microbatches=count, **sizes)


STEPS = legal_steps().map(_checked)


def sizes_of(shape: PipelineShape) -> dict[str, int]:
    sizes = {"num_ranks": shape.num_ranks, "num_chunks": shape.num_chunks}
    return sizes if shape.group_size is None else {**sizes, "group_size": shape.group_size}


@settings(max_examples=150)
@given(STEPS)
def test_idle_time_is_that_of_a_simulation(case: tuple[str, PipelineShape]) -> None:
    name, shape = case
    run = simulate(build_schedule(name, num_microbatches=shape.num_microbatches, **sizes_of(shape)))
    family = get_family(name)
    for rank in range(shape.num_ranks):
        assert run.makespan_ms - run.busy_ms(rank) == family.idle_forwards(shape)
        assert run.bubble_ratio(rank) == family.bubble_ratio(shape)


@settings(max_examples=150)
@given(STEPS)
def test_numbers_in_flight_are_those_counted_in_all_steps(case: tuple[str, PipelineShape]) -> None:
    name, shape = case
    sizes = sizes_of(shape)
    family = get_family(name)
    for rank in range(shape.num_ranks):
        all_counts = [
            in_flight(
                family.rank_actions(check_step(name, num_microbatches=count, **sizes), rank),
                num_ranks=shape.num_ranks,
                num_chunks=shape.num_chunks,
            )
            for count in legal_counts(**sizes, schedule=name).up_to(shape.num_microbatches)
        ]
        assert family.in_flight(shape, rank) == InFlight(
            per_chunk=tuple(
                map(max, zip(*(counts.per_chunk for counts in all_counts), strict=True))
            ),
            together=max(counts.together for counts in all_counts),
        )


@given(
    st.integers(-3, 60),
    st.integers(1, 6).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, 3 * p))),
    st.integers(1, 3),
)
def test_nearest_legal_counts_are_found_without_a_search(
    count: int, ranks_and_group: tuple[int, int], num_chunks: int
) -> None:
    num_ranks, group_size = ranks_and_group
    sizes = {"num_ranks": num_ranks, "num_chunks": num_chunks, "group_size": group_size}
    below = [other for other in range(count) if other in legal_counts(**sizes)]
    above = [other for other in range(count + 1, 90) if other in legal_counts(**sizes)]
    assert legal_counts(**sizes).nearest(count) == (*below[-1:], *above[:1])


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 8), (4, 8), (8, 32)])
def test_split_backwards_of_equal_thirds_leave_one_chunks_forward_per_rank(num_ranks, count):
    """Qi et al. 2023: a V idles (p - 1) F of its chunks, where 1F1B idles (p - 1)(F + B)."""
    costs = CostModel(forward_ms=0.5, backward_ms=1.0, input_grad_ms=0.5, weight_grad_ms=0.5)
    for name in ("interleaved-zb", "zb-v", "dualpipe-v"):
        built = build_schedule(name, num_ranks=num_ranks, num_chunks=2, num_microbatches=count)
        assert simulate(built, costs).makespan_ms == 3.0 * count + 0.5 * (num_ranks - 1)


def test_sending_takes_time_between_ranks_only():
    built = build_schedule("1f1b", num_ranks=2, num_microbatches=1)
    run = simulate(built, CostModel(send_ms=0.25))
    assert [(span.start_ms, span.end_ms) for span in run.spans[1]] == [(1.25, 2.25), (2.25, 4.25)]
    assert run.spans[0][1].start_ms == 4.5
    alone = build_schedule("1f1b", num_ranks=1, num_microbatches=3)
    assert simulate(alone, CostModel(send_ms=9.0)).makespan_ms == 9.0


@pytest.mark.parametrize("costs", [{"forward_ms": 0}, {"backward_ms": -1.0}, {"send_ms": -0.1}])
def test_costs_must_make_sense(costs):
    with pytest.raises(ScheduleError):
        CostModel(**costs)


def test_costs_by_stage():
    built = megatron_schedule(2, 1, 3)
    costs = {
        0: CostModel(forward_ms=1.0, backward_ms=2.0),
        1: CostModel(forward_ms=3.0, backward_ms=4.0),
    }
    # The last rank is never idle between its first forward and last backward: 1 + 3 * 7 + 2.
    assert simulate(built, costs).makespan_ms == 24.0
    equal = CostModel(forward_ms=1.5, backward_ms=2.5, send_ms=0.5)
    assert simulate(built, {0: equal, 1: equal}).spans == simulate(built, equal).spans


# The files and pictures of schedules/ are those of the code.

FOLDER = Path(__file__).parents[2] / "schedules"


@pytest.mark.parametrize("name", list_schedules())
def test_a_file_and_a_picture_are_those_of_the_code(name: str) -> None:
    num_chunks = get_family(name).num_chunks or 2
    schedule = build_schedule(name, num_ranks=4, num_chunks=num_chunks, num_microbatches=8)
    path = FOLDER / f"{name}.csv"
    assert path.read_text() == schedule.to_csv()
    read = read_schedule(str(path))
    assert read is not None
    assert (read.actions, read.placement) == (schedule.actions, schedule.placement)
    simulation = simulate(schedule, CostModel().scaled(1 / num_chunks))
    picture = draw_svg(simulation, slots=assign_slots(schedule))
    assert path.with_suffix(".svg").read_text() == picture


def test_the_page_has_every_schedule() -> None:
    page = (FOLDER / "README.md").read_text()
    assert tuple(re.findall(r"^## `(.+)`$", page, re.MULTILINE)) == list_schedules()
    assert tuple(re.findall(r"^!\[(.+)\]\(\1\.svg\)$", page, re.MULTILINE)) == list_schedules()

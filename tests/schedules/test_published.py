"""The files and pictures of schedules/ are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chunkgraph.schedules import (
    build_schedule,
    draw_svg,
    get_family,
    list_schedules,
    read_schedule,
    simulate,
)
from chunkgraph.slots import assign_slots

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
    picture = draw_svg(simulate(schedule), slots=assign_slots(schedule))
    assert path.with_suffix(".svg").read_text() == picture


def test_the_page_has_every_schedule() -> None:
    page = (FOLDER / "README.md").read_text()
    assert tuple(re.findall(r"^## `(.+)`$", page, re.MULTILINE)) == list_schedules()
    assert tuple(re.findall(r"^!\[(.+)\]\(\1\.svg\)$", page, re.MULTILINE)) == list_schedules()

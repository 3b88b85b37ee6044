"""Schedules for Megatron's pipeline, by name and from a CSV file."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkgraph.errors import ConfigError, ScheduleError
from chunkgraph.megatron.pipeline.choice import (
    PipelinePlace,
    PipelineSchedule,
)
from chunkgraph.schedules import build_schedule

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def _place(rank: int, num_chunks: int = 1) -> PipelinePlace:
    return PipelinePlace(
        rank=rank, pipeline_rank=rank, pipeline_size=2, num_chunks=num_chunks, group_size=2
    )


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "interleaved-zb"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_needs_the_slots_of_the_schedule_that_it_holds(
    tmp_path: Path, name: str, rank: int
) -> None:
    num_chunks = 2 if name.startswith("interleaved") else 1
    schedule = build_schedule(name, num_ranks=2, num_chunks=num_chunks, num_microbatches=8)
    place = _place(rank, num_chunks)
    named = PipelineSchedule.of(name, place)
    from_file = PipelineSchedule.of(_file(tmp_path, schedule.to_csv()), place)
    assert from_file.build(8).actions == named.build(8).actions
    assert from_file.splits_backward is named.splits_backward
    for are_shared in (False, True):
        of_file, of_name = (
            place.num_slots(schedule, are_shared=are_shared) for schedule in (from_file, named)
        )
        assert of_file == of_name


def test_files_that_cannot_drive_megatron_are_refused(tmp_path: Path) -> None:
    v = build_schedule("zb-v", num_ranks=2, num_chunks=2, num_microbatches=4)
    with pytest.raises(ConfigError, match="places stages in a V"):
        PipelineSchedule.of(_file(tmp_path, v.to_csv()), _place(0, 2))
    plain = build_schedule("1f1b", num_ranks=2, num_microbatches=4)
    with pytest.raises(ConfigError, match=r"has 2 ranks of 1 chunk, but the pipeline has 2 of 2"):
        PipelineSchedule.of(_file(tmp_path, plain.to_csv()), _place(0, 2))
    with pytest.raises(ConfigError, match="of 4 microbatches, but a step has 3"):
        PipelineSchedule.of(_file(tmp_path, plain.to_csv()), _place(0)).build(3)
    with pytest.raises(ConfigError, match="cannot read the schedule"):
        PipelineSchedule.of(str(tmp_path / "none.csv"), _place(0))
    with pytest.raises(ScheduleError, match="row 1 as CSV"):
        PipelineSchedule.of(_file(tmp_path, "0B0,0F0\n1F0,1B0\n"), _place(0))


def test_schedules_with_other_actions_have_other_names(tmp_path: Path) -> None:
    """Ranks compare them, and a file may lie elsewhere on each."""
    names = ("1f1b", "zb-h1", "1f1b")
    files = []
    for number, name in enumerate(names):
        (tmp_path / f"{number}").mkdir()
        text = build_schedule(name, num_ranks=2, num_microbatches=4).to_csv()
        files.append(str(PipelineSchedule.of(_file(tmp_path / f"{number}", text), _place(0))))
    assert files[0] == files[2] != files[1]
    assert str(PipelineSchedule.of("zb-h1", _place(0))) == "zb-h1"

"""A schedule from a file is checked with the configuration, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkgraph.errors import ChunkGraphError
from chunkgraph.schedules import build_schedule
from chunkgraph.settings import Config, load_config

_TWO_RANKS = Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml"


def _load(tmp_path: Path, text: str, *overrides: str) -> Config:
    (tmp_path / "mine.csv").write_text(text)
    schedule = f"pipeline.schedule={tmp_path / 'mine.csv'}"
    return load_config(_TWO_RANKS, [schedule, *overrides])


def test_a_schedule_that_matches_is_accepted(tmp_path: Path) -> None:
    text = build_schedule("zb-h1", num_ranks=2, num_microbatches=4).to_csv()
    config = _load(tmp_path, text, "train.num_microbatches=[4,4]")
    assert config.pipeline.schedule == str(tmp_path / "mine.csv")


@pytest.mark.parametrize(
    ("text", "counts", "message"),
    [
        ("0F0,0W0,0I0\n1F0,1I0,1W0\n", "[1]", "0W0 runs before 0I0"),
        ("0F0,0B0\n", "[1]", r"mine\.csv has 1 rank of 1 chunk, but the pipeline has 2 of 1"),
        (
            "0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n",
            "[2]",
            r"mine\.csv: row 2 has 1F1 before the forward of microbatch 0\. .* count up",
        ),
        (
            "0F0,0B0\n1F0,1B0\n",
            "[1,3,2]",
            r"of 1 microbatch, but a step has 2, 3\. Change train\.num_microbatches",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    tmp_path: Path, text: str, counts: str, message: str
) -> None:
    with pytest.raises(ChunkGraphError, match=message):
        _load(tmp_path, text, f"train.num_microbatches={counts}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("pipeline.schedule=gpipe",), "slots for a fixed number; use 1f1b or zb-h1"),
        (("pipeline.schedule=interleaved-zb",), "num_chunks is 1: use 'zb-h1', or set a virtual"),
    ],
)
def test_names_that_do_not_fit_the_pipeline_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ChunkGraphError, match=message):
        load_config(_TWO_RANKS, ["train.num_microbatches=[4]", *overrides])


def test_a_file_may_have_counts_that_megatron_lacks_if_nothing_is_compared(tmp_path: Path) -> None:
    overrides = (
        "pipeline.virtual_pipeline_model_parallel_size=2",
        "model.num_layers=4",
        "train.num_microbatches=[1]",
    )
    text = "0F0,2F0,2I0,0B0,2W0\n1F0,3F0,3I0,1I0,3W0,1W0\n"
    with pytest.raises(ChunkGraphError, match=r"legal count is 2\. The file may .*compare is none"):
        _load(tmp_path, text, *overrides)
    _load(tmp_path, text, *overrides, "train.compare=none")


def test_gpipe_drives_training_without_graphs() -> None:
    config = load_config(_TWO_RANKS, ["pipeline.schedule=gpipe", "capture.enabled=false"])
    assert config.pipeline.schedule == "gpipe"

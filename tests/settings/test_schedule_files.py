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
        ("0F0,0B0\n1F0,1F1,1B0,1B1\n", "[1]", "mine.csv"),
        ("0F0,0B0\n", "[1]", r"mine\.csv has 1 ranks of 1 chunk\(s\), but the pipeline has 2 of 1"),
        (
            "0F0,0B0\n1F0,1B0\n",
            "[1,3,2]",
            r"of 1 microbatches, but a step has 2, 3\. Change train\.num_microbatches",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(
    tmp_path: Path, text: str, counts: str, message: str
) -> None:
    with pytest.raises(ChunkGraphError, match=message):
        _load(tmp_path, text, f"train.num_microbatches={counts}")

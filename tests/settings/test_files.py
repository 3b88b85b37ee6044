"""Configuration files: YAML, bases and errors with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import SMALL

from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.schedules import build_schedule
from chunkgraph.settings import Config, load_config


def _write(folder: Path, **files: Any) -> None:
    for name, values in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def test_a_file_holds_what_differs_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    middle = {"extends": "base.yaml", "device": "cpu", "train": {"lr": 0.5}}
    _write(tmp_path, base=SMALL, middle=middle)
    top = {"extends": "../middle.yaml", "model": {"num_layers": 12}, "train": {"seed": 7}}
    _write(tmp_path / "inner", top=top)
    config = load_config(tmp_path / "inner" / "top.yaml", ["train.seed=8"])
    assert (config.device, config.train.lr, config.train.seed) == ("cpu", 0.5, 8)
    assert (config.model.num_layers, config.model.hidden_size) == (12, 64)


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ("top.yaml", ["extends itself: ", "top.yaml -> ", "Remove one 'extends'"]),
        ("missing.yaml", ["top.yaml: cannot extend its base", "missing.yaml", "cannot read"]),
        (3, ["extends is 3; it must be the path of one file"]),
        ("text.yaml", ["text.yaml: expected sections"]),
    ],
)
def test_a_base_that_cannot_be_used(tmp_path: Path, base: object, parts: list[str]) -> None:
    _write(tmp_path, top={**SMALL, "extends": base}, text="text")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "top.yaml")
    for part in parts:
        assert part in str(error.value)


TAGGED = ("!!bool maybe", "!!timestamp now", "!!int ''", "!!map [1]")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["expected sections", "got None"]),
        ("model: {num_layers: 1}\ntrain: {num_microbatches: [1]}", ["model.hidden_size is miss"]),
        ("device: 3\nmodel: 4\ntrain: 5", ["device is 3;", "model is 4; it must be a section"]),
        ("model: {a: 1, 'a': 2}", ["line 1, column 15", "the key 'a' is written twice"]),
        ("a: !!python/object/apply:os.system [ls]", ["line 1, column 4", "not valid YAML", "tag"]),
        (b"a: \xff", ["not valid YAML"]),
        *((f"a: {tagged}", ["not valid YAML"]) for tagged in TAGGED),
        ("a: " + "x" * 300_000, ["it is larger than 65536 bytes"]),
        ("1: 2", ["unknown key '1' in the top level"]),
        ("model: &a [*a]", ["model is [[", "it must be a section"]),
    ],
)
def test_a_bad_file_is_named_with_the_place(
    tmp_path: Path, text: str | bytes, parts: list[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        load_config(path)
    message = str(error.value)
    for part in [str(path), *parts]:
        assert part in message
    assert len(message) < 3000


def test_a_small_number_needs_no_dot(tmp_path: Path) -> None:
    _write(tmp_path, base=SMALL)
    for text, value in {"1e-3": 1e-3, "2E+1": 20.0, "1.5e-3": 1.5e-3, "3": 3.0}.items():
        assert load_config(tmp_path / "base.yaml", [f"train.lr={text}"]).train.lr == value


# A schedule from a file is checked with the configuration, before anything is started.

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
    with pytest.raises(ChunkGraphError, match=r"legal: 2\)\. The file may .*compare is none"):
        _load(tmp_path, text, *overrides)
    _load(tmp_path, text, *overrides, "train.compare=none")


def test_gpipe_drives_training_without_graphs() -> None:
    config = load_config(_TWO_RANKS, ["pipeline.schedule=gpipe", "capture.enabled=false"])
    assert config.pipeline.schedule == "gpipe"

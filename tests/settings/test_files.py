"""Configuration files that extend others, and errors with their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_settings import SMALL

from chunkgraph.errors import ConfigError
from chunkgraph.settings import (
    load_config,
    load_with_origins,
)


def _write(folder: Path, **files: Any) -> None:
    for name, values in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))


def test_a_file_holds_what_differs_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    _write(
        tmp_path,
        base=SMALL,
        middle={"extends": "base.yaml", "name": "middle", "train": {"lr": 0.5}},
    )
    _write(
        tmp_path / "inner",
        top={"extends": "../middle.yaml", "model": {"num_layers": 12}, "train": {"seed": 7}},
    )
    loaded = load_with_origins(tmp_path / "inner" / "top.yaml", ["train.seed=8"])
    config = loaded.config
    assert (config.name, config.train.lr, config.train.seed) == ("middle", 0.5, 8)
    assert (config.model.num_layers, config.model.hidden_size) == (12, 64)
    origins = {
        key: Path(loaded.origins[key]).name
        for key in ("model.hidden_size", "train.lr", "model.num_layers", "train.seed")
    }
    assert list(origins.values()) == ["base.yaml", "middle.yaml", "top.yaml", "override"]
    assert "run.timeout_s" not in loaded.origins


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ("top.yaml", ["extends itself: ", "top.yaml -> ", "Remove one 'extends'"]),
        ("round.yaml", ["extends itself: ", "round.yaml -> "]),
        ("missing.yaml", ["top.yaml: cannot extend its base", "missing.yaml", "cannot read"]),
        (3, ["extends: expected the path of one file; got 3"]),
        (["a", "b"], ["extends: expected the path of one file; got ['a', 'b'] (list)"]),
        ("text.yaml", ["text.yaml: expected sections"]),
    ],
)
def test_a_base_that_cannot_be_used(tmp_path: Path, base: object, parts: list[str]) -> None:
    _write(tmp_path, top={**SMALL, "extends": base}, round={"extends": "top.yaml"}, text="text")
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "top.yaml")
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["expected sections", "nothing (null)"]),
        ("train: {num_microbatches: [1]}", ["model is missing and has no default"]),
        ("model: {num_layers: 1}\ntrain: {num_microbatches: [1]}", ["model.hidden_size is miss"]),
        ("name: 3\nmodel: 4\ntrain: 5", ["model: expected a section", "4 (whole number)"]),
    ],
)
def test_bad_file_is_named_with_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    for part in [str(path), *parts]:
        assert part in str(error.value)

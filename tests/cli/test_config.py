"""`chunkgraph config`: all settings, those of a file, and the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chunkgraph.cli.__main__ import main
from chunkgraph.settings import (
    Config,
    config_from_mapping,
    load_config,
    resolved,
    settings_of,
    to_mapping,
)

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = str(CONFIGS / "cpu" / "gpt_pp2_vpp2_cpu.yaml")
SHIPPED = sorted(CONFIGS.glob("*/*.yaml"))


def _print(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_without_a_file_it_prints_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert _print(capsys) == (CONFIGS / "reference.yaml").read_text()


def test_the_page_of_the_documentation_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CONFIGS.parent / "docs" / "settings.md").read_text()
    assert _print(capsys, "--markdown") == page
    for item in settings_of(Config):
        assert f"| `{item.name}` | " in page
        assert item.flag is None or f"`{item.flag}`" in page


def test_each_setting_has_its_help_and_its_origin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    text = _print(capsys, "configs/cpu/gpt_pp2_vpp2_cpu.yaml", "train.lr=0.5")
    lines = [line.strip() for line in text.splitlines()]
    for line in (
        "# Learning rate of Adam.",
        "lr: 0.5  # override",
        "seed: 1234  # default",
        "pipeline_model_parallel_size: 2  # configs/cpu/gpt_pp2_cpu.yaml",
        "virtual_pipeline_model_parallel_size: 2  # configs/cpu/gpt_pp2_vpp2_cpu.yaml",
        "microbatch_group_size_per_vp_stage: 2  # derived from other settings",
    ):
        assert line in lines
    assert max(map(len, text.splitlines())) <= 80
    for item in settings_of(Config):
        assert any(line.startswith(f"{item.name}:") for line in lines), item.path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_it_prints_is_the_same_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(path)
    whole = yaml.safe_load(_print(capsys, str(path)))
    assert whole == to_mapping(resolved(config))
    short = yaml.safe_load(_print(capsys, str(path), "--diff"))
    assert config_from_mapping(short) == config


def test_diff_holds_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["train.lr=0.001", "capture.verify=shadow", "run={timeout_s: 30}"]
    short = yaml.safe_load(_print(capsys, CONFIG, *overrides, "--diff"))
    assert short["capture"] == {"verify": "shadow"}
    assert short["run"] == {"timeout_s": 30}
    defaults = {item.path: item.default for item in settings_of(Config)}
    for section, values in short.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            assert value != defaults[f"{section}.{key}"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.yaml"], "missing.yaml: cannot read the configuration file"),
        ([CONFIG, "lr=0.1"], "unknown key 'lr' in the top level. Did you mean 'train.lr'?"),
        ([CONFIG, "train.seeed=1"], "Did you mean 'seed'?"),
        ([CONFIG, "train.verify=none"], "Did you mean 'capture.verify'?"),
        ([CONFIG, "train.lr=-1"], "train.lr is -1.0; it must be greater than 0"),
        (["--diff"], "--diff needs a CONFIG"),
        ([CONFIG, "--schema"], "leave out CONFIG"),
    ],
)
def test_what_is_wrong_is_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1


def test_the_schema_knows_what_the_loader_knows(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(_print(capsys, "--schema"))
    properties: dict[str, Any] = schema["properties"]
    for item in settings_of(Config):
        section, _, name = item.path.rpartition(".")
        described = (properties[section]["properties"] if section else properties)[name]
        assert described["description"] == item.help
        for choice in item.choices:
            assert choice in described["enum"]
    train = properties["train"]["properties"]
    assert train["lr"] == {
        "description": "Learning rate of Adam.",
        "type": "number",
        "exclusiveMinimum": 0,
        "default": 0.001,
    }
    assert train["num_microbatches"]["items"] == {"type": "integer", "exclusiveMinimum": 0}
    assert properties["model"]["properties"]["fp8"]["enum"] == ["hybrid", "e4m3", None]
    raw = yaml.safe_load((CONFIGS / "reference.yaml").read_text())
    assert set(raw) | {"extends"} == set(properties)

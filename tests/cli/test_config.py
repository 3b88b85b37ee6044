"""`chunkgraph config`: all settings, those of a file, and the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chunkgraph.cli.__main__ import main
from chunkgraph.settings import Config, load_config, resolved, settings_of, to_mapping

CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = str(CONFIGS / "cpu" / "gpt_pp2_vpp2_cpu.yaml")


def _print(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["config", *arguments]) == 0
    return capsys.readouterr().out


def test_the_page_of_the_documentation_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    page = (CONFIGS.parent / "docs" / "settings.md").read_text()
    assert _print(capsys) == page
    for item in settings_of(Config):
        assert f"| `{item.name}` | " in page


def test_a_file_is_printed_as_it_is_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    printed = yaml.safe_load(_print(capsys, CONFIG, "train.lr=0.5"))
    assert printed == to_mapping(resolved(load_config(CONFIG, ["train.lr=0.5"])))
    assert printed["train"]["lr"] == 0.5
    assert printed["pipeline"]["microbatch_group_size_per_vp_stage"] == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["missing.yaml"], "missing.yaml: cannot read the configuration file"),
        ([CONFIG, "train.lr=-1"], "train.lr is -1; it must be greater than 0"),
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
    sections: dict[str, Any] = {
        name: schema["$defs"][part["$ref"].rpartition("/")[2]]
        for name, part in schema["properties"].items()
        if "$ref" in part
    }
    for item in settings_of(Config):
        section, _, name = item.path.rpartition(".")
        described = (sections[section] if section else schema)["properties"][name]
        assert " ".join(described["description"].split()) == item.help
        assert all(f'"{choice}"' in json.dumps(described) for choice in item.choices)
    lr = sections["train"]["properties"]["lr"]
    assert (lr["type"], lr["exclusiveMinimum"], lr["default"]) == ("number", 0, 0.001)
    assert "required" not in schema
    assert set(schema["properties"]) == {*Config.model_fields, "extends"}
    assert schema["additionalProperties"] is False

"""The error of a removed setting names its replacement."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import FLAGS, check_flag_values
from chunkgraph.settings import Config, load_config, settings_of
from chunkgraph.settings.renamed import SUCCESSORS, successor

CONFIG = Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml"
KEYS = [name for name in SUCCESSORS if not name.startswith("-")]
FLAG_NAMES = [name for name in SUCCESSORS if name.startswith("--cuda-graph-")]


def test_what_has_a_successor_is_gone() -> None:
    known = {item.path for item in settings_of(Config)} | {flag.name for flag in FLAGS}
    assert not known & set(SUCCESSORS)
    for todo in SUCCESSORS.values():
        for word in todo.replace(",", "").split():
            if word.startswith(("packing.", "capture.", "stash.", "--cuda")):
                assert word in known
    assert successor("capture.verify") == ""


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_is_gone_names_its_successor(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    path = tmp_path / "config.yaml"
    path.write_text(f"extends: {CONFIG}\n{section}: {{{name}: 1}}\n")
    for arguments in ((path,), (CONFIG, [f"{key}=1"])):
        with pytest.raises(ConfigError) as error:
            load_config(*arguments)  # type: ignore[arg-type]
        assert f"{key} no longer exists. {SUCCESSORS[key]}." in str(error.value)


@pytest.mark.parametrize("flag", FLAG_NAMES)
def test_a_flag_that_is_gone_names_its_successor(flag: str) -> None:
    for arguments in ([flag, "1"], [f"{flag}=1"]):
        with pytest.raises(ConfigError) as error:
            check_flag_values(arguments)
        assert str(error.value) == f"{flag} no longer exists. {SUCCESSORS[flag]}."

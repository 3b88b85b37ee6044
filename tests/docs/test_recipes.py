"""The commands of docs/recipes.md are planned: none is refused, and the page has their memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from training_needs import NEEDS_TRAINING

from chunkgraph.cli.__main__ import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
_TEXTS_AND_BLOCKS = re.split(r"```bash\n(.*?)```\n", PAGE, flags=re.DOTALL)
SHARED, *COMMANDS = _TEXTS_AND_BLOCKS[1::2]
TEXTS = _TEXTS_AND_BLOCKS[2::2]
"""What the page says before each command."""
_PRINT = "print_words() { printf '%s\\0' \"$@\"; }\n"


def words_of(command: str) -> list[str]:
    """Return the words of a command as a shell passes them."""
    script = f"{_PRINT}{SHARED}print_words {command}"
    shell = ["bash", "-euc", script]
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def planned(words: list[str]) -> list[str]:
    """Return the command line that plans a command; its script stands in for Megatron's."""
    if words[:2] == ["chunkgraph", "plan"]:
        return words[1:]
    place = next(i for i, word in enumerate(words) if word.endswith(".py"))
    options = dict(re.findall(r"--([\w-]+)[= ](\d+)", " ".join(words[:place])))
    num_ranks = int(options.get("nproc-per-node") or options["nodes"])
    num_ranks *= int(options.get("gpus-per-node", 1))
    memory = [] if "--hybrid-layer-pattern" in words else ["--gpu-memory", "80GiB"]
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    return [
        "launch",
        "--plan",
        *memory,
        "--nproc-per-node",
        str(num_ranks),
        script,
        *words[place + 1 :],
    ]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[str]], int]]:
    """Return what runs a command line here; a plan changes the process's environment."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["chunkgraph"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with mock.patch.dict(os.environ), warnings.catch_warnings():
        yield main


@pytest.mark.megatron
@NEEDS_TRAINING
@pytest.mark.parametrize(
    ("command", "text"),
    [
        pytest.param(command, text, id=f"command {place}")
        for place, (command, text) in enumerate(zip(COMMANDS, TEXTS[:-1], strict=True))
        if "examples/" not in command
    ],
)
def test_a_recipe_is_planned_with_the_memory_that_the_page_states(
    command: str,
    text: str,
    run: Callable[[list[str]], int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(planned(words_of(command)))
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "compatible with chunk graphs" in out or command.startswith("chunkgraph plan ")
    if "Memory is not estimated" in text:
        assert "Memory is not estimated for hybrid models." in out
    else:
        (stated,) = re.findall(r"([\d.]+ GiB)", text)
        assert re.findall(r"Fits in .*: rank \d+ needs (\S+ GiB)\.", out) == [stated]


def test_other_commands_are_of_examples_that_exist() -> None:
    others = [words_of(command) for command in COMMANDS if "examples/" in command]
    assert others
    for words in others:
        path = next(word for word in words if word.startswith("examples/"))
        assert words[-1] in (ROOT / path).read_text()


@pytest.mark.megatron
@NEEDS_TRAINING
def test_a_recipe_with_a_flag_that_graphs_refuse_fails(
    run: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(planned([*words_of(COMMANDS[0]), "--use-torch-fsdp2"])) == 2
    assert "--use-torch-fsdp2: chunk graphs do not support it" in capsys.readouterr().err


def test_every_array_is_defined_once() -> None:
    """A shell expands an unknown array to nothing."""
    names = re.findall(r"^(\w+)=\(", SHARED, re.MULTILINE)
    assert len(names) == len(set(names))
    assert set(re.findall(r"\{(\w+)\[@\]\}", PAGE)) == set(names)

"""The display of a run's progress lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from chunkgraph.cli.progress import TrainProgress
from chunkgraph.settings import load_config

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml"


@pytest.mark.parametrize(("free_bytes", "note"), [(3 << 30, "  3.0 GiB left"), (None, "")])
def test_captures_and_the_memory_left_are_shown(free_bytes: int | None, note: str) -> None:
    shown = io.StringIO()
    config = load_config(CONFIG)
    progress = TrainProgress(config, Console(file=shown))
    for number in range(1, 9):
        progress.capture(number, 8, free_bytes)
    lines = [line for line in shown.getvalue().splitlines() if "graph " in line]
    assert lines == [f"chunk graphs: graph 4/8{note}", f"chunk graphs: graph 8/8{note}"]

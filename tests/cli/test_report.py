"""What the closing report of a training run says behind its table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from chunkgraph.cli.report import print_report
from chunkgraph.cli.results import results_from
from chunkgraph.config import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_pp2_cpu.yaml"


def printed(memsets_kept: list[str]) -> str:
    results = results_from(
        {
            "steps": [],
            "parameters_equal": True,
            "num_parameters_compared": 10,
            "capture_sessions": 1,
            "captures_after_first_session": 0,
            "slots_per_chunk": [[2], [1]],
            "num_graphs": 6,
            "memsets_kept": memsets_kept,
        }
    )
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        print_report(load_config(CONFIG), results, console)
    return capture.get()


def test_memsets_that_stay_are_told_once_for_each_reason() -> None:
    assert "memsets" not in printed(["", ""])
    text = printed(["no bindings", "", "no bindings"])
    assert text.count("no kernels, which costs some microseconds each: no bindings\n") == 1

"""What the closing report of a training run says behind its table."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from chunkgraph.cli.report import print_report
from chunkgraph.cli.train_setup import report
from chunkgraph.errors import OutputError
from chunkgraph.settings import load_config
from chunkgraph.trainer.results import RunResults, results_from

CONFIG = Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml"


def results_with(memsets_kept: list[str]) -> RunResults:
    return results_from(
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


def printed(memsets_kept: list[str]) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        print_report(load_config(CONFIG), results_with(memsets_kept), console)
    return capture.get()


def test_memsets_that_stay_are_told_once_for_each_reason() -> None:
    assert "memsets" not in printed(["", ""])
    text = printed(["no bindings", "", "no bindings"])
    assert text.count("no kernels, which costs some microseconds each: no bindings\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_results_are_printed_though_their_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    args = argparse.Namespace(json=link)
    with pytest.raises(OutputError, match="No space left on device"):
        report(args, load_config(CONFIG), results_with([]))
    assert "parameters after the run: equal" in capsys.readouterr().out
    assert link.is_symlink()

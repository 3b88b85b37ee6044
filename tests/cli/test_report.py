"""The progress lines and the closing report of a training run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chunkgraph.cli.report import print_report, report
from chunkgraph.errors import OutputError
from chunkgraph.settings import load_config
from chunkgraph.trainer.results import RunResults, StepResult, find_failures

CONFIG = Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml"


RESULTS = RunResults(
    steps=[],
    num_parameters_compared=10,
    capture_sessions=1,
    captures_after_first_session=0,
    slots_per_chunk=[[2], [1]],
    num_graphs=6,
)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_table_is_printed_though_the_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left"):
        report(load_config(CONFIG), RESULTS, link)
    assert "parameters after the run: equal" in capsys.readouterr().out
    assert link.is_symlink()


STEP = StepResult(
    step=0,
    num_microbatches=4,
    loss=2.5,
    grad_norm=1.5,
    replays=4,
    step_ms=12.34,
)


def report_of(*overrides: str, **changes: Any) -> str:
    results = replace(RESULTS, steps=[STEP], **changes)
    console = Console(width=80, highlight=False)
    config = load_config(CONFIG, ["train.num_microbatches=[4]", *overrides])
    with console.capture() as capture:
        print_report(config, results, find_failures(results), console)
    return capture.get()


def test_memory_is_reported_where_it_is_known() -> None:
    assert "peak memory" not in report_of(reserved_bytes=[0, 0])
    text = report_of(reserved_bytes=[2**30, 3 * 2**30])
    assert "peak memory that torch reserved, by rank: 1.0 GiB, 3.0 GiB" in text


def test_verification_reports_what_it_compared() -> None:
    text = report_of("train.compare=none", "capture.verify=shadow")
    assert "capture.verify=shadow: 1 replayed step, 4 forwards" in text
    text = report_of("train.compare=none", "capture.verify=shadow", capture_sessions=0)
    assert "capture.verify=shadow verified nothing" in text


def test_a_run_without_captures_is_not_simply_ok() -> None:
    text = report_of("train.compare=none", capture_sessions=0)
    assert "nothing was captured: every step ran eagerly" in text
    assert text.endswith("OK, but nothing was captured\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"different_parameters": {"rank 0": ["w"]}}, "the parameters after the run differ from"),
        ({"captures_after_first_session": 2}, "captured after the first session: 2 slots"),
    ],
)
def test_a_broken_promise_is_a_problem(changes: dict[str, Any], message: str) -> None:
    text = " ".join(report_of(**changes).split())
    assert "FAILED: 1 problem" in text
    assert message in text

"""The verdicts and exit codes of ``chunkgraph launch --compare``, from records of ranks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from chunkgraph.cli.__main__ import main
from chunkgraph.cli.launch_compare import compare
from chunkgraph.errors import WorkerError
from chunkgraph.launch.flags import RECORD_VARIABLE

GIB = 2**30


def record(losses: Sequence[float], ms: float = 100.0, **more: Any) -> dict[str, Any]:
    """Return what one rank writes: two measured steps, and a loss and a norm of every step."""
    values = [[loss.hex(), (2 * loss).hex()] for loss in losses]
    fields = {"reserved_bytes": 10 * GIB, "capture_ms": 0.0, "late_ms": 0.0}
    return {"step_ms": [ms, ms + 2], "values": values, **fields, **more}


class Runs:
    """Writes prepared records instead of training; keeps the names of the runs."""

    def __init__(self, **records: Any) -> None:
        self.records, self.names = records, []

    def __call__(self, environment: Mapping[str, str]) -> None:
        run = json.loads(environment[RECORD_VARIABLE])
        self.names.append(run["run"])
        found = self.records[run["run"]]
        if found and isinstance(found[0], list):  # one list of ranks for each time
            found = found.pop(0)
        for rank, one in enumerate(found):
            if isinstance(one, WorkerError):
                raise one
            Path(run["folder"], f"rank{rank}.json").write_text(json.dumps(one))


def test_equal_and_faster_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [3.0, 2.5, 2.25]
    graphs = [
        record(losses, 48.0, capture_ms=1500.0, late_ms=0.0, reserved_bytes=9 * GIB),
        record(losses, 50.0, capture_ms=900.0, late_ms=4.0, reserved_bytes=8 * GIB),
    ]
    runs = Runs(
        eager=[record(losses, 99.0), record(losses, 100.0)],
        chunk=graphs,
        local=[WorkerError("Rank 0 failed: no room")],
    )
    file = tmp_path / "result.json"
    assert compare(runs, 2, ["local"], file) == 0
    assert runs.names == ["chunk", "eager", "local"]
    output = capsys.readouterr().out
    rows = [line.split() for line in output.splitlines()]
    # The slowest rank, the fullest one, the latest one.
    assert ["eager", "101.0", "1.000", "10.0", "GiB", "-", "-", "-"] in rows
    assert ["chunk", "51.0", "0.505", "9.0", "GiB", "3/3", "4.0", "ms", "1.50", "s"] in rows
    assert ["local", "failed"] in rows
    for text in (
        "Graphs take 0.50 of the time and 0.90 of the memory of eager training",
        "Where kernels take 2.0 times as long",
        "chunk: all losses and gradient norms equal eager ones to the last bit.",
        "local failed: Rank 0 failed: no room",
    ):
        assert text in output
    document = json.loads(file.read_text())
    assert [run["name"] for run in document["runs"]] == ["eager", "chunk", "local"]
    assert document["runs"][1]["step_ms"] == [50.0, 52.0]
    assert document["runs"][2]["error"] == "Rank 0 failed: no room"
    assert document["verdict"][-1] == "local failed: Rank 0 failed: no room"


@pytest.mark.parametrize(
    ("of_chunk", "again", "code", "text"),
    [
        ([3.0, 2.0], [3.0, 2.5], 1, "from step 2 on, by 2.0e-01; eager training repeats itself."),
        ([3.0, 2.4], [3.0, 2.0], 0, "within twice its spread, 2.0e-01"),
        ([3.0, 1.0], [3.0, 2.4], 0, "NOT within twice its spread, 4.0e-02"),
        ([3.0, 2.0], [3.0, 2.0], 0, "norms equal those of a second eager run to the last bit."),
        ([3.0, 2.5], None, 0, "equal eager ones to the last bit"),
        ([3.0, float("nan")], [3.0, 2.5], 1, "from step 2 on, by inf"),
    ],
)
def test_a_difference_is_judged_by_a_second_eager_run(
    of_chunk: list[float],
    again: list[float] | None,
    code: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    eager = [[record([3.0, 2.5])], [record(again or [])]]
    runs = Runs(eager=eager, chunk=[record(of_chunk, 99.0)])
    assert compare(runs, 2, [], None) == code
    assert runs.names == ["chunk", "eager", *(["eager"] if again else [])]
    output = capsys.readouterr().out
    assert text in output
    assert "Graphs take 0.99 of the time and 1.00 of the memory" in output


@pytest.mark.parametrize("ms", [96.0, 130.0])
def test_graphs_that_save_nothing(ms: float, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(eager=[record([3.0])], chunk=[record([3.0], ms)])
    assert compare(runs, 2, [], None) == 0
    output = capsys.readouterr().out
    assert "of eager training. They save little time here." in output
    assert "Where kernels" not in output


def test_zeros_of_two_signs_differ(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(eager=[[record([0.0])], [record([0.0])]], chunk=[record([-0.0])])
    assert compare(runs, 2, [], None) == 1
    assert "differs from eager training from step 1 on, by 0.0e+00" in capsys.readouterr().out


def test_a_result_on_standard_output_stands_alone(capfd: pytest.CaptureFixture[str]) -> None:
    runs = Runs(eager=[record([3.0])], chunk=[record([3.0])])

    def launch(environment: Mapping[str, str]) -> None:
        subprocess.run(["echo", "the script's own output"], check=True)
        runs(environment)

    assert compare(launch, 2, [], Path("-")) == 0
    output, log = capfd.readouterr()
    assert [run["name"] for run in json.loads(output)["runs"]] == ["eager", "chunk"]
    assert log.count("the script's own output") == 2


def test_a_run_that_must_succeed_ends_the_comparison() -> None:
    for records in ({"chunk": [WorkerError("x")]}, {"chunk": [record([3.0])], "eager": []}):
        runs = Runs(**records)
        with pytest.raises(WorkerError, match=r"x|--compare 2: the script trained fewer steps"):
            compare(runs, 2, ["local"], None)
        assert runs.names == list(records)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (["--compare", "0"], [], "--compare N trains N >= 1 steps"),
        (["--compare", "2", "--plan"], [], "Leave --plan, torchrun and srun out"),
        (["--against", "local"], [], "add --compare"),
        (["--json", "x.json"], [], "add --compare"),
        (
            ["--compare", "2", "--against", "local,eager"],
            [],
            "--against eager: give local,transformer_engine",
        ),
        (["--compare", "2", "--json", "nowhere/x.json"], [], "the folder nowhere does not exist"),
        ([], ["--compare", "2"], "--compare belongs before the script"),
    ],
)
def test_mistakes(
    before: list[str],
    after: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "pretrain.py"
    script.write_text("raise SystemExit(0)\n", encoding="utf-8")
    assert main(["launch", *before, str(script), *after]) == 2
    assert message in capsys.readouterr().err

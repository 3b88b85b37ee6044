"""``chunkgraph launch --compare``: train a command line eagerly and with graphs, and compare."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from chunkgraph._outputs import output_to_stderr, stream_next_to, write_output
from chunkgraph._text import format_bytes
from chunkgraph.cli.plan_tables import table
from chunkgraph.errors import WorkerError
from chunkgraph.launch.flags import RECORD_VARIABLE

Launch = Callable[[Mapping[str, str]], None]
"""A function that runs the ranks with more environment variables."""
Run = dict[str, Any]
"""A run: its ``name``, its ``error`` if it failed, and otherwise what `StepRecorder` writes: for
each step the longest time of a rank and the values of all, and the largest of other numbers."""

_OWN = ("chunk", "eager")
"""The runs that must succeed; the first may be refused."""
_GAIN = 1.05
"""Graphs pay if eager steps take at least this multiple of their time."""


def compare(launch: Launch, num_steps: int, against: Sequence[str], json_file: Path | None) -> int:
    """Train the runs in fresh processes, one after the other, and print a table and a verdict.

    Args:
        launch: Runs the ranks.
        num_steps: Number of steps to measure.
        against: Megatron's implementations of graphs to run as well.
        json_file: File for the results; None: write none.

    Returns:
        The exit code: 1 if chunk graphs differ from eager training, which repeats itself.

    Raises:
        WorkerError: Training failed, eagerly or with chunk graphs.
    """
    chunk, eager, *others = (_train(launch, name, num_steps) for name in (*_OWN, *against))
    again, runs = eager, [eager, chunk, *others]
    console = Console(file=stream_next_to(json_file), highlight=False, markup=False)
    headings = ("", "ms a step", "of eager", "reserved", "equal steps", "GPU waited", "capture")
    console.print(table(headings, [_row(run, eager) for run in runs]))
    done = [run for run in runs if "error" not in run]
    if any(run["values"] != eager["values"] for run in done):
        again = _train(launch, "eager", num_steps)
    verdict = [_gain(eager, chunk), *(_equality(run, eager, again) for run in done[1:])]
    verdict += [f"{run['name']} failed: {run['error']}" for run in runs if "error" in run]
    for line in verdict:
        console.print(line, soft_wrap=True)
    if json_file is not None:
        document = {"runs": runs, "verdict": verdict}
        write_output("--json", json_file, json.dumps(document, indent=1) + "\n")
    return int(chunk["values"] != eager["values"] == again["values"])


def _train(launch: Launch, name: str, num_steps: int) -> Run:
    print(f"--compare {num_steps}: training starts, {name}", file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="chunkgraph-") as folder:
        request = {"run": name, "num_steps": num_steps, "folder": folder}
        try:
            with output_to_stderr():
                launch({RECORD_VARIABLE: json.dumps(request)})
            files = sorted(Path(folder).glob("rank*.json"))
            if not files:
                raise WorkerError(
                    f"--compare {num_steps}: the script trained fewer steps. Raise --train-iters "
                    "or --train-samples, or leave --skip-train out."
                )
        except WorkerError as error:
            if name in _OWN:
                raise
            return {"name": name, "error": str(error)}
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {
        "name": name,
        **{key: max(rank[key] for rank in ranks) for key in ranks[0]},
        "step_ms": [max(s) for s in zip(*(rank["step_ms"] for rank in ranks), strict=True)],
        "values": [[*chain(*s)] for s in zip(*(rank["values"] for rank in ranks), strict=True)],
    }


def _row(run: Run, eager: Run) -> list[str]:
    if "error" in run:
        return [run["name"], "failed", *[""] * 5]
    step_ms, has_replays = statistics.median(run["step_ms"]), run["capture_ms"] > 0
    return [
        run["name"],
        f"{step_ms:.1f}",
        f"{step_ms / statistics.median(eager['step_ms']):.3f}",
        format_bytes(run["reserved_bytes"]),
        f"{_num_equal(run, eager)}/{len(eager['values'])}" if run is not eager else "-",
        f"{run['late_ms']:.1f} ms" if has_replays else "-",
        f"{run['capture_ms'] / 1e3:.2f} s" if has_replays else "-",
    ]


def _gain(eager: Run, chunk: Run) -> str:
    """Return whether chunk graphs pay."""
    if not eager["reserved_bytes"]:
        return "Without a GPU, times tell nothing: recordings stand in for graphs."
    gain = statistics.median(eager["step_ms"]) / statistics.median(chunk["step_ms"])
    of_memory = chunk["reserved_bytes"] / eager["reserved_bytes"]
    parts = f"{1 / gain:.2f} of the time and {of_memory:.2f} of the memory"
    text = f"Graphs take {parts} of eager training."
    if gain < _GAIN:
        return f"{text} They save little time here."
    return (
        f"{text} Where kernels take {gain:.1f} times as long as here, as for longer sequences or "
        "wider layers, they save little."
    )


def _equality(run: Run, eager: Run, again: Run) -> str:
    """Return whether a run is equal to eager training, or as far from it as that from itself."""
    for other, those in ((eager, "eager ones"), (again, "those of a second eager run")):
        if run["values"] == other["values"]:
            return f"{run['name']}: all losses and gradient norms equal {those} to the last bit."
    gap, spread = min(_distance(run, one) for one in (eager, again)), _distance(again, eager)
    step = _num_equal(run, eager) + 1
    line = f"{run['name']} differs from eager training from step {step} on, by {gap:.1e}"
    if not spread:
        return f"{line}; eager training repeats itself."
    place = f"{'' if gap <= 2 * spread else 'NOT '}within twice its spread, {spread:.1e}"
    return f"{line}; eager training does not repeat itself: {place}."


def _num_equal(run: Run, eager: Run) -> int:
    """Return the number of steps before the first that differs."""
    pairs = zip(run["values"], eager["values"], strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(eager["values"]))


def _distance(run: Run, other: Run) -> float:
    """Return the largest relative difference of losses and gradient norms; inf for a NaN."""
    both = zip(chain(*run["values"]), chain(*other["values"]), strict=True)
    pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in both if a != b]
    gaps = (abs(a - b) / (max(abs(a), abs(b)) or 1.0) for a, b in pairs)
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)

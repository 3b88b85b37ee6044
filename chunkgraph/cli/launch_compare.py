"""``chunkgraph launch --compare``: train a command line eagerly and with graphs, and compare."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from chunkgraph._outputs import stream_next_to, write_output
from chunkgraph._text import counted, format_bytes
from chunkgraph.cli.plan_tables import table
from chunkgraph.errors import WorkerError
from chunkgraph.launch.flags import RECORD_VARIABLE

_SMALL_GAIN, _LONG_WAIT = 0.95, 0.05
_SPREADS = 2
"""A run is within the spread of eager runs up to this multiple of their own distance."""


@dataclass
class Run:
    """One run of the command line.

    Attributes:
        name: What captured: ``eager`` (nothing), ``chunk``, or a value of ``--cuda-graph-impl``.
        ranks: The records of the ranks, as `StepRecorder` writes them; empty if the run failed.
        error: Why it failed.
    """

    name: str
    ranks: Sequence[Mapping[str, Any]] = ()
    error: str = ""

    @property
    def step_ms(self) -> float:
        """Return the median time of the measured steps, each on its slowest rank."""
        times = zip(*(rank["step_ms"] for rank in self.ranks), strict=True)
        return statistics.median(max(of_ranks) for of_ranks in times)

    def most(self, key: str) -> Any:
        """Return the largest value of a rank; None if none measured it."""
        return max((r[key] for r in self.ranks if r[key] is not None), default=None)

    @property
    def steps(self) -> list[list[str]]:
        """Return the losses and gradient norms of each step, of all ranks, in hexadecimal."""
        by_step = zip(*(rank["values"] for rank in self.ranks), strict=True)
        return [list(chain(*of_ranks)) for of_ranks in by_step]

    def num_equal(self, other: Run) -> int:
        """Return the number of steps before the first that differs from another run's."""
        pairs = zip(self.steps, other.steps, strict=True)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.steps))

    def distance(self, other: Run) -> float:
        """Return the largest relative difference of losses and gradient norms; inf for a NaN."""
        both = zip(chain(*self.steps), chain(*other.steps), strict=True)
        pairs = [(float.fromhex(a), float.fromhex(b)) for a, b in both if a != b]
        gaps = (abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)
        return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=0.0)


def compare(
    launch: Callable[[Mapping[str, str]], None],
    num_steps: int,
    against: Sequence[str],
    json_file: Path | None,
) -> int:
    """Train the runs in fresh processes, one after the other, and print a table and a verdict.

    Args:
        launch: Function that runs the ranks with more environment variables.
        num_steps: Number of steps to measure.
        against: Megatron's implementations of graphs to run as well.
        json_file: File for the results; None: write none.

    Returns:
        The exit code: 1 if chunk graphs failed, or differ although eager runs are equal.

    Raises:
        WorkerError: Eager training failed.
    """
    runs = [_train(launch, name, num_steps) for name in ("eager", "chunk", *against)]
    eager, chunk = runs[:2]
    done = [run for run in runs if run.ranks]
    again = eager
    if any(run.num_equal(eager) < len(eager.steps) for run in done):
        again = _train(launch, "eager", num_steps)
    spread = again.distance(eager)
    verdict = [*_times(eager, chunk), *(_equality(run, eager, again) for run in done[1:])]
    verdict += [f"{run.name} failed: {run.error}" for run in runs if run.error]
    verdict += eager.ranks[0]["hints"]
    console = Console(file=stream_next_to(json_file), highlight=False, markup=False)
    headings = ("", "ms a step", "of eager", "reserved", "equal steps", "GPU waited", "capture")
    console.print(table(headings, [_row(run, eager) for run in runs]))
    for line in verdict:
        console.print(line, soft_wrap=True)
    if json_file is not None:
        document = {
            "runs": [
                {**vars(run), **({"step_ms": run.step_ms} if run.ranks else {})} for run in runs
            ],
            "eager_spread": spread,
            "verdict": verdict,
        }
        write_output("--json", json_file, json.dumps(document, indent=1) + "\n")
    return int(not chunk.ranks or (spread == 0 and chunk.distance(eager) > 0))


def _train(launch: Callable[[Mapping[str, str]], None], name: str, num_steps: int) -> Run:
    """Train one run; only eager training must succeed."""
    print(f"--compare: {name}", file=sys.stderr, flush=True)
    with TemporaryDirectory(prefix="chunkgraph-") as folder:
        request = {"run": name, "num_steps": num_steps, "folder": folder}
        try:
            launch({RECORD_VARIABLE: json.dumps(request)})
            files = sorted(Path(folder).glob("rank*.json"))
            if not files:
                raise WorkerError(f"the script trained fewer than {num_steps} steps")
        except WorkerError as error:
            if name == "eager":
                raise
            return Run(name, error=str(error))
        return Run(name, [json.loads(file.read_text(encoding="utf-8")) for file in files])


def _row(run: Run, eager: Run) -> list[str]:
    if not run.ranks:
        return [run.name, "failed", *[""] * 5]
    num_bytes, late_ms, capture_ms = map(run.most, ("reserved_bytes", "late_ms", "capture_ms"))
    return [
        run.name,
        f"{run.step_ms:.1f}",
        f"{run.step_ms / eager.step_ms:.3f}",
        format_bytes(num_bytes) if num_bytes else "-",
        f"{run.num_equal(eager)}/{len(eager.steps)}",
        "-" if late_ms is None else f"{late_ms:.1f} ms",
        "-" if capture_ms is None else f"{capture_ms / 1e3:.2f} s",
    ]


def _times(eager: Run, chunk: Run) -> Iterator[str]:
    """Yield whether chunk graphs pay, and what keeps them from more."""
    if not chunk.ranks:
        return
    if not (num_bytes := eager.most("reserved_bytes")):
        yield "Without a GPU, times tell nothing: recordings stand in for graphs."
        return
    share, of_memory = chunk.step_ms / eager.step_ms, chunk.most("reserved_bytes") / num_bytes
    line = f"Graphs take {share:.2f} of the time and {of_memory:.2f} of the memory of eager"
    if share > _SMALL_GAIN:
        yield f"{line} training: the GPU was busy without them, too."
    else:
        yield (
            f"{line} training, whose launches they save. Kernels that took {1 / share:.1f} times "
            "as long, for longer sequences or wider layers, would leave little to save."
        )
    late_ms = chunk.most("late_ms") or 0.0
    if late_ms > _LONG_WAIT * chunk.step_ms:
        yield (
            f"The GPU waited {late_ms / chunk.step_ms:.0%} of a step for the host before replays: "
            "look for a loss function or data loader that reads values of the device."
        )


def _equality(run: Run, eager: Run, again: Run) -> str:
    """Return whether a run is equal to eager training, or as far from it as that from itself."""
    num_equal, num_steps = run.num_equal(eager), len(eager.steps)
    if num_equal == num_steps:
        return f"{run.name}: all losses and gradient norms equal eager training to the last bit."
    distance, spread = min(run.distance(one) for one in (eager, again)), again.distance(eager)
    line = f"{run.name} differs from eager training from step {num_equal + 1} on, by {distance:.1e}"
    if not spread:
        return f"{line}; eager training repeats itself in {counted(num_steps, 'step')}."
    within = "within" if distance <= _SPREADS * spread else "NOT within"
    return f"{line}; eager does not repeat itself: {within} its spread of {spread:.1e}."

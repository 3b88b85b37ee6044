"""One training process: ``python -m chunkgraph.megatron.worker CONFIG RUN_DIR``.

Started once for each rank, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set as
torchrun sets them. Leaves in the run folder:

* ``rank0.json``: the results, by rank 0, whole or not at all;
* ``progress.jsonl``: a line for each step and capture, by rank 0;
* ``error_rank{r}.txt``: when rank r fails, one clear message, an empty line, the traceback.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkgraph._collector import collector_paused
from chunkgraph._processes import die_with_parent, guard_session, leave
from chunkgraph.errors import ChunkGraphError, ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from chunkgraph.config import Config

__all__ = [
    "append_progress",
    "describe_error",
    "keep_quiet",
    "lost_a_peer",
    "main",
    "train_rank",
    "write_error",
    "write_whole",
]

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
    "Application timeout",
)


def main(config_path: str, run_dir: str) -> int:
    """Train by the configuration file; returns the exit code (0, 1 failed, 2 bad usage)."""
    rank = int(os.environ.get("RANK", "0"))
    folder = Path(run_dir)
    try:
        # Imported here: an import that fails is reported.
        from chunkgraph.config import load_config

        progress = append_progress(folder / "progress.jsonl") if rank == 0 else None
        results = train_rank(load_config(config_path), progress)
        if rank == 0:
            write_whole(folder / "rank0.json", json.dumps(results, indent=1) + "\n")
    except Exception as error:  # noqa: BLE001 - the outermost frame: everything is reported
        return write_error(folder, rank, error)
    return 0


def write_error(folder: Path, rank: int, error: Exception) -> int:
    """Leave one clear message, an empty line and the traceback; returns the exit code for it."""
    text = f"{describe_error(error, rank)}\n\n{''.join(traceback.format_exception(error))}"
    write_whole(folder / f"error_rank{rank}.txt", text)
    usage = isinstance(error, (ConfigError, MissingDependencyError))
    return _EXIT_USAGE if usage else _EXIT_FAILED


def train_rank(
    config: Config, on_progress: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Train as the rank that RANK, WORLD_SIZE and the like make of this process.

    Args:
        config: the run.
        on_progress: called with the progress line of each step, session and captured graph; None
            on ranks that nobody watches.

    Returns:
        The whole job's results as plain values for JSON, the same on every rank.
    """
    if not config.run.debug:
        keep_quiet()
    # Imported here: a bad configuration needs no torch.
    with collector_paused():
        from chunkgraph.megatron.loop import StepRecord
        from chunkgraph.megatron.processes import training_process
        from chunkgraph.megatron.training import train

    def on_step(phase: str, record: StepRecord) -> None:
        if on_progress is None:
            return
        line = {
            "phase": phase,
            "step": record.step,
            "num_steps": len(config.train.num_microbatches),
            "loss": record.loss,
            "num_microbatches": record.num_microbatches,
        }
        events = ["capture", "step"] if record.captures else ["step"]
        for event in events:
            on_progress({**line, "event": event})

    def on_capture(num_captured: int, num_graphs: int, free_bytes: int | None) -> None:
        if on_progress is None:
            return
        line = {"phase": "chunk", "event": "capturing", "num_captured": num_captured}
        on_progress({**line, "num_graphs": num_graphs, "free_bytes": free_bytes})

    with ExitStack() as stack:
        with collector_paused():  # it imports Megatron
            device = stack.enter_context(training_process(config))
        return train(config, device, on_step=on_step, on_capture=on_capture)


def append_progress(path: Path) -> Callable[[dict[str, Any]], None]:
    """A progress callback that appends each line to a file, as JSON."""

    def append(line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return append


def keep_quiet() -> None:
    """Drop what every rank would print about packages and torch calls that no user can change."""
    warnings.filterwarnings("ignore", module=r"(megatron|transformer_engine|torch\.distributed)\b")
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)


def lost_a_peer(error: Exception) -> bool:
    """Whether an error is only what another rank's end looks like from here."""
    return not isinstance(error, ChunkGraphError) and any(sign in str(error) for sign in _LOST_PEER)


def describe_error(error: Exception, rank: int) -> str:
    """One message that names the rank, for those who read no tracebacks."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ChunkGraphError):
        return text if text.lower().startswith("rank") else f"Rank {rank}: {text}"
    first = text.splitlines()[0]
    if lost_a_peer(error):
        return (
            f"Rank {rank} stopped because another rank ended or did not answer in time "
            f"({first}). The cause is in that rank's error file or log."
        )
    return f"Rank {rank} failed: {type(error).__name__}: {first}"


def write_whole(path: Path, text: str) -> None:
    """Write through a temporary file, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.stderr.write("usage: python -m chunkgraph.megatron.worker CONFIG RUN_DIR\n")
        raise SystemExit(_EXIT_USAGE)
    die_with_parent()
    guard_session()
    code = main(sys.argv[1], sys.argv[2])
    report = Path(sys.argv[2]) / f"error_rank{os.environ.get('RANK', '0')}.txt"
    if code and report.exists():
        sys.stderr.write(report.read_text(encoding="utf-8"))
    leave(code)

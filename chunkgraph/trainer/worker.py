"""Run one training process, the target of `chunkgraph.jobs.worker_main`.

It runs once for each rank, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set as by
torchrun. Rank 0 writes in the run folder:

* ``rank0.json``: the results, complete or not at all;
* ``progress.jsonl``: a line for each step and capture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chunkgraph._collector import collector_paused
from chunkgraph.jobs.processes import keep_quiet
from chunkgraph.jobs.reports import append_progress, write_whole
from chunkgraph.settings import Config, load_config
from chunkgraph.trainer.results import RunResults

__all__ = ["main", "train_rank"]


def main(config_path: str, run_dir: str) -> int:
    """Train by the configuration file and write the results; return 0."""
    is_first = int(os.environ.get("RANK", "0")) == 0
    folder = Path(run_dir)
    progress = append_progress(folder / "progress.jsonl") if is_first else None
    results = train_rank(load_config(config_path), progress)
    if is_first:
        write_whole(folder / "rank0.json", json.dumps(results.to_mapping(), indent=1) + "\n")
    return 0


def train_rank(
    config: Config, on_progress: Callable[[dict[str, Any]], None] | None = None
) -> RunResults:
    """Train as the rank that the environment variables RANK and WORLD_SIZE define.

    Args:
        config: the run.
        on_progress: callback with the progress line of each step, session and captured graph; None
            on ranks other than 0.

    Returns:
        The whole job's results, the same on every rank.
    """
    if os.environ.get("CHUNKGRAPH_DEBUG") != "1":  # see `worker_environment`
        keep_quiet()
    # Imported here: a bad configuration needs no torch.
    with collector_paused():
        from chunkgraph.trainer.compare import train
        from chunkgraph.trainer.setup import training_process
        from chunkgraph.trainer.trained_model import StepRecord

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

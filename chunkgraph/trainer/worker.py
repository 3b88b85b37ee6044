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
    config = load_config(config_path)
    if os.environ.get("RANK", "0") != "0":
        train_rank(config)
        return 0
    folder = Path(run_dir)
    results = train_rank(config, append_progress(folder / "progress.jsonl"))
    write_whole(folder / "rank0.json", json.dumps(results.to_mapping(), indent=1) + "\n")
    return 0


def train_rank(
    config: Config, on_progress: Callable[[dict[str, Any]], None] = lambda _: None
) -> RunResults:
    """Train as the rank that the environment variables RANK and WORLD_SIZE define.

    Args:
        config: the run.
        on_progress: callback with the progress line of each step, session and captured graph.

    Returns:
        The whole job's results, the same on every rank.
    """
    if os.environ.get("CHUNKGRAPH_DEBUG") != "1":  # see `worker_environment`
        keep_quiet()

    def on_step(phase: str, record: Any) -> None:
        for event in ["capture", "step"] if record.captures else ["step"]:
            on_progress(
                {
                    "phase": phase,
                    "step": record.step,
                    "num_steps": len(config.train.num_microbatches),
                    "loss": record.loss,
                    "num_microbatches": record.num_microbatches,
                    "event": event,
                }
            )

    def on_capture(num_captured: int, num_graphs: int, free_bytes: int | None) -> None:
        line = {"phase": "chunk", "event": "capturing", "num_captured": num_captured}
        on_progress({**line, "num_graphs": num_graphs, "free_bytes": free_bytes})

    with ExitStack() as stack:
        with collector_paused():
            # Imported here: a bad configuration needs neither torch nor Megatron.
            from chunkgraph.trainer.compare import train
            from chunkgraph.trainer.setup import training_process

            device = stack.enter_context(training_process(config))
        return train(config, device, on_step=on_step, on_capture=on_capture)

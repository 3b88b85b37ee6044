"""Runs ``chunkgraph train`` with a stand-in for the training: driver.py BEHAVIOUR ARGUMENT...

BEHAVIOUR is one of ``stub_workers.py``, for which STUB_FOLDER names the folder, or changes of the
results as JSON. The latter start the ranks one after the other without the import of torch, which
takes longest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import stub_workers

from chunkgraph.cli import __main__, train
from chunkgraph.cli.report import TrainProgress
from chunkgraph.jobs import launcher
from chunkgraph.settings import Config
from chunkgraph.trainer.results import RunResults, StepRecord, StepResult


class WithoutTorch(launcher.Launcher):
    """Runs each rank to its end."""

    def run(self) -> None:
        job = {"WORLD_SIZE": str(self.num_ranks), "MASTER_ADDR": "-", "MASTER_PORT": "-"}
        for rank in reversed(range(self.num_ranks)):
            command = [sys.executable, *self.command]
            env = {**os.environ, **self.environment, **job, "RANK": str(rank)}
            if code := subprocess.run(command, env=env, check=False).returncode:
                sys.exit(code)


def results_of(config: Config, last_step: dict[str, Any], **changes: Any) -> RunResults:
    steps: list[StepResult] = []
    for step, count in enumerate(config.train.num_microbatches):
        values: dict[str, Any] = {
            "step": step,
            "num_microbatches": count,
            "loss": 5.123456789,
            "grad_norm": 1.25,
        }
        steps.append(
            StepResult(
                **values,
                step_ms=10.0,
                captures=6 if step == 1 else 0,
                replays=count if step else 0,
                fallbacks={} if step else {"capture warmup": 1},
                eager=StepRecord(**values, step_ms=20.0),
                different=[],
            )
        )
    steps[-1] = replace(steps[-1], **last_step)
    results: dict[str, Any] = {
        "parameters_equal": True,
        "num_parameters_compared": 10,
        "capture_sessions": 1,
        "captures_after_first_session": 0,
        "slots_per_chunk": [[2, 1]],
        "num_graphs": 12,
    }
    return RunResults(steps=steps, **{**results, **changes})


def stub(behaviour: str) -> Any:
    def train_stub(config: Config, *, is_first: bool, debug: bool) -> RunResults:
        progress = TrainProgress(config, is_shown=is_first)
        if behaviour.startswith("{"):
            changes = {"last_step": {}, **json.loads(behaviour)}
            results = results_of(config, **changes)
            for step in results.steps:
                progress.step("chunk", step)
            return results
        stub_workers.behave(behaviour, Path(os.environ["STUB_FOLDER"]))
        return results_of(config, {})

    return train_stub


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        launcher.Launcher = WithoutTorch  # type: ignore[misc]
    train._COMMAND = (__file__, sys.argv[1])  # type: ignore[assignment]
    train._train = stub(sys.argv[1])
    sys.exit(__main__.main(sys.argv[2:]))

"""Record Megatron's training steps, without a wait of the host, to compare them."""

from __future__ import annotations

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chunkgraph.engine.observer import Observer
from chunkgraph.launch.flags import FLAGS
from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names

if TYPE_CHECKING:
    from chunkgraph.launch.hooks import ChunkGraphsInPretrain

_TRAINING = "megatron.training.training"
_NUM_TRACED = 2
"""Steps after the measured ones, in which the waits before replays are measured."""
_WITHOUT_OUTPUT = {
    **dict.fromkeys(("save", "save_interval", "non_persistent_save_interval", "exit_interval")),
    **dict.fromkeys(
        ("tensorboard_dir", "wandb_project", "exit_duration_in_mins", "full_validation")
    ),
    **dict.fromkeys(("async_save", "log_progress", "eval_iters", "optimizer_cuda_graph"), 0),
}
"""Megatron's arguments of runs that leave nothing behind."""


def mark() -> torch.cuda.Event:
    """Return an event after all work that the host has launched on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StepRecorder(Observer):
    """Train a few steps in Megatron's program, write what they took and gave, and end the run.

    In the last steps it observes late replays, which the host launches when the device has finished
    the one before in the same step, and how long the device waited for them.

    Args:
        hooks: The hooks of chunk graphs.
        run: What captures: ``eager`` (nothing), ``chunk``, or a value of ``--cuda-graph-impl``.
        num_steps: Number of steps to measure, after those in which graphs are captured.
        folder: Folder for the records of the ranks.
    """

    def __init__(
        self, hooks: ChunkGraphsInPretrain, *, run: str, num_steps: int, folder: str
    ) -> None:
        self._hooks, self._run, self._num_steps = hooks, run, num_steps
        self._folder = Path(folder)
        self._steps: list[tuple[Any, ...]] = []  # begin, losses, gradient norm
        self._replayed: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._settle, hooks.parsed = hooks.parsed, self._parsed  # type: ignore[method-assign]
        self._train, self._get_args = private_names(_TRAINING, "train_step", "get_args")
        training = import_megatron(_TRAINING)
        self.close = patch_attributes(training, {"train_step": self._train_step})

    def _parsed(self, args: argparse.Namespace) -> None:
        """Change the parsed arguments to those of the run."""
        self._num_warmup = int(getattr(args, "cuda_graph_warmup_steps", 3)) + 2
        self._last = self._num_warmup + self._num_steps + _NUM_TRACED
        vars(args).update({name: _WITHOUT_OUTPUT[name] for name in _WITHOUT_OUTPUT if name in args})
        if args.train_iters is not None:  # otherwise the number of samples is given
            args.train_iters = max(args.train_iters, self._last)
        args.chunkgraph = self._run == "chunk"
        if self._run != "chunk":
            vars(args).update(dict.fromkeys(item.dest for item in FLAGS))
            args.cuda_graph_granularity = "layer"
            args.cuda_graph_impl = "none" if self._run == "eager" else self._run
        self._settle(args)

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self._steps) + 1
        if number == 1:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self._hooks.graphs is not None and number == self._last - _NUM_TRACED + 1:
            self._hooks.graphs.engine.observe(self)
        begin = mark()
        result = self._train(*args, **kwargs)
        norm = result[5]
        if isinstance(norm, torch.Tensor):  # perhaps in a buffer of the optimizer's graph
            norm = norm.clone()
        self._steps.append((begin, result[0], norm))
        if number == self._last:
            self._write()
            of_run = self._get_args()
            of_run.exit_interval = of_run.curr_iteration + 1
        return result

    def before(self, *_: object) -> None:
        """Mark the end of the wait for a late replay."""
        if self._replayed is not None and self._replayed.query():
            self._waits.append((self._replayed, mark()))

    def after(self, *_: object) -> None:
        """Mark the end of a replay."""
        self._replayed = mark()

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Forget the step's last replay."""
        self._replayed = None

    def _write(self) -> None:
        torch.cuda.synchronize()
        report = self._hooks.graphs and self._hooks.graphs.engine.report
        # With what Megatron does between two steps, for which the device may wait.
        times = [one[0].elapsed_time(two[0]) for one, two in pairwise(self._steps)]
        record = {
            "step_ms": times[self._num_warmup : self._num_warmup + self._num_steps],
            # Of all steps, to the last bit.
            "values": [
                [float(value).hex() for value in (*losses.values(), norm or 0.0)]
                for _, losses, norm in self._steps
            ],
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "capture_ms": report.duration_ms if report else 0.0,
            "late_ms": sum(one.elapsed_time(two) for one, two in self._waits) / _NUM_TRACED,
        }
        path = self._folder / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(record), encoding="utf-8")

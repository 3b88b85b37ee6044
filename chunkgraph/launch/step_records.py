"""Record what Megatron's training steps take, without a wait of the host.

The ranks of `chunkgraph launch --compare` record all steps; a normal run tells once what a step
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
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
_NUM_ANNOUNCED = 20
_WITHOUT_OUTPUT = {
    **dict.fromkeys(("save", "save_interval", "non_persistent_save_interval", "exit_interval")),
    **dict.fromkeys(("tensorboard_dir", "wandb_save_dir", "exit_duration_in_mins")),
    **dict.fromkeys(("async_save", "log_progress"), False),
    "wandb_project": "",
    "eval_iters": 0,
}
"""Megatron's arguments of runs that leave nothing behind."""


def mark() -> torch.cuda.Event:
    """Return an event after all work that the host has launched on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class LateReplays(Observer):
    """Measure how long the device waits for replays that the host launches late.

    A replay is late if the device has finished the one before it in the same step.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def before(self, *_: object) -> None:
        """Mark the end of the wait for a late replay."""
        if self._last is not None and self._last.query():
            self._waits.append((self._last, mark()))

    def after(self, *_: object) -> None:
        """Mark the end of a replay."""
        self._last = mark()

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Forget the step's last replay."""
        self._last = None

    def total_ms(self) -> float:
        """Return the sum of the waits, all of which must be over."""
        return sum(first.elapsed_time(last) for first, last in self._waits)


class StepRecorder:
    """Train a few steps in Megatron's program, write what they took and gave, and end the run.

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
        self._late = LateReplays()
        self._steps: list[tuple[Any, ...]] = []  # begin, end, losses, gradient norm
        self._settle, hooks.parsed = hooks.parsed, self._parsed  # type: ignore[method-assign]
        self._train, self._get_args = private_names(_TRAINING, "train_step", "get_args")
        training = import_megatron(_TRAINING)
        self.close = patch_attributes(training, {"train_step": self._train_step})

    def _parsed(self, args: argparse.Namespace) -> None:
        """Change the parsed arguments to those of the run."""
        self._num_warmup = int(getattr(args, "cuda_graph_warmup_steps", 3)) + 2
        self._last = self._num_warmup + self._num_steps + _NUM_TRACED
        for name in _WITHOUT_OUTPUT.keys() & vars(args).keys():
            setattr(args, name, _WITHOUT_OUTPUT[name])
        if args.train_iters:
            args.train_iters = max(args.train_iters, self._last)
        args.chunkgraph = self._run == "chunk"
        if self._run != "chunk":
            vars(args).update(dict.fromkeys(item.dest for item in FLAGS))
            args.cuda_graph_granularity = "layer"
            args.cuda_graph_impl = "none" if self._run == "eager" else self._run
            args.optimizer_cuda_graph = False
            _choose_modules(args)
        self._settle(args)

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self._steps) + 1
        if number == 1:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if self._hooks.graphs is not None and number == self._last - _NUM_TRACED + 1:
            self._hooks.graphs.engine.observe(self._late)
        begin = mark()
        result = self._train(*args, **kwargs)
        end = mark()
        norm = result[5]  # perhaps in a buffer of the optimizer's graph
        norm = norm.clone() if isinstance(norm, torch.Tensor) else norm
        self._steps.append((begin, end, result[0], norm))
        if number == self._last:
            self._write()
            of_run = self._get_args()
            of_run.exit_interval = of_run.curr_iteration + 1
        return result

    def _write(self) -> None:
        torch.cuda.synchronize()
        report = self._hooks.graphs and self._hooks.graphs.engine.report
        times = [begin.elapsed_time(end) for begin, end, *_ in self._steps]
        record = {
            "step_ms": times[self._num_warmup : self._num_warmup + self._num_steps],
            # Of all steps, to the last bit.
            "values": [
                [float(value).hex() for value in (*losses.values(), norm or 0.0)]
                for _, _, losses, norm in self._steps
            ],
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "capture_ms": report.duration_ms if report else 0.0,
            "late_ms": self._late.total_ms() / _NUM_TRACED,
            "hint": hint(self._get_args()),
        }
        path = self._folder / f"rank{os.environ['RANK']}.json"
        path.write_text(json.dumps(record), encoding="utf-8")


def _choose_modules(args: argparse.Namespace) -> None:
    """Choose what Megatron's graphs hold of layers with experts that have no fixed capacity."""
    is_dropless = args.num_experts and args.moe_expert_capacity_factor is None
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        is_whole = name in args and getattr(args, name) in (None, [], "full", ["full"])
        if is_whole and is_dropless and args.cuda_graph_impl != "none":
            dense = ["mlp"] if "0" in str(args.moe_layer_freq) else []
            setattr(args, name, ["attn", *dense, "moe_router", "moe_preprocess"])


class ReplayedSteps:
    """Tell once what a step takes, after steps in a row that were only replayed.

    What Megatron does between two steps counts, and a median ignores a few evaluations.

    Args:
        tell: Function to call with the median of their times, in ms.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._marks: list[torch.cuda.Event] = []
        self._is_told = False

    def step(self, *, is_replayed: bool) -> None:
        """Mark the end of a step."""
        if self._is_told:
            return
        if len(self._marks) <= _NUM_ANNOUNCED:
            self._marks = [*(self._marks if is_replayed else ()), mark()]
        elif self._marks[-1].query():
            self._is_told = True
            pairs = zip(self._marks, self._marks[1:], strict=False)
            self._tell(statistics.median(first.elapsed_time(last) for first, last in pairs))


def hint(args: argparse.Namespace) -> str:
    """Return a sentence about work of every step that a flag of Megatron saves; empty if none."""
    if args.cross_entropy_loss_fusion:
        return ""
    return "Faster, with other rounding: --cross-entropy-loss-fusion reads the logits less often."

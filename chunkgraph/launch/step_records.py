"""Record what Megatron's training steps take, without a wait of the host.

The ranks of `chunkgraph launch --compare` record all steps; a normal run tells once what a step
takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
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


class StepClock:
    """Marks in the work of this rank's device, and the time between them.

    Args:
        on_cpu: Whether there is no GPU; marks are then times of the host.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu

    def mark(self) -> Any:
        """Return a mark after all work that the host has launched on the current stream."""
        if self._on_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has passed a mark, without a wait."""
        return self._on_cpu or bool(mark.query())

    def ms_between(self, first: Any, last: Any) -> float:
        """Return the time between two marks that the device has passed, in ms."""
        return (last - first) * 1e3 if self._on_cpu else float(first.elapsed_time(last))


class LateReplays(Observer):
    """Measure how long the device waited, since the host launched replays late.

    A replay is late if the device has finished the one before it when the host launches it. At the
    beginning of a step none is.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._last: Any = None
        self._waits: list[tuple[Any, Any]] = []

    def before(self, *_: object) -> None:
        """Measure the wait before a replay that is late."""
        if self._last is not None and self._clock.is_past(self._last):
            self._waits.append((self._last, self._clock.mark()))

    def after(self, *_: object) -> None:
        """Mark the end of a replay."""
        self._last = self._clock.mark()

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Forget the last replay of a step."""
        self._last = None

    def total_ms(self) -> float:
        """Return the waits of all steps; the device must have finished them."""
        return sum(self._clock.ms_between(*wait) for wait in self._waits)


class StepRecorder:
    """Train a few steps in Megatron's program, write what they took and gave, and end the run.

    Args:
        hooks: The hooks of chunk graphs.
        run: What captures: ``eager`` (nothing), ``chunk``, or a value of ``--cuda-graph-impl``.
        num_steps: Number of steps to measure, after those in which graphs are captured.
        folder: Folder for the records of the ranks.
    """

    def __init__(
        self, hooks: ChunkGraphsInPretrain, *, run: str, num_steps: int, folder: str, on_cpu: bool
    ) -> None:
        self._hooks, self._run, self._folder = hooks, run, Path(folder)
        self._num_steps, self._on_cpu = num_steps, on_cpu
        self._clock = StepClock(on_cpu=on_cpu)
        self._late = LateReplays(self._clock)
        self._steps: list[tuple[Any, Any, Mapping[str, Any], Any]] = []
        self._settle, hooks.parsed = hooks.parsed, self._parsed  # type: ignore[method-assign]
        self._train, self._get_args = private_names(_TRAINING, "train_step", "get_args")
        training = import_megatron(_TRAINING)
        self.close = patch_attributes(training, {"train_step": self._train_step})

    def _parsed(self, args: argparse.Namespace) -> None:
        """Change the parsed arguments to those of the run."""
        self._num_warmup = int(getattr(args, "cuda_graph_warmup_steps", 3)) + 2
        self._num_all = self._num_warmup + self._num_steps + _NUM_TRACED
        for name in _WITHOUT_OUTPUT.keys() & vars(args).keys():
            setattr(args, name, _WITHOUT_OUTPUT[name])
        if getattr(args, "train_iters", None):
            args.train_iters = max(args.train_iters, self._num_all)
        args.chunkgraph = self._run == "chunk"
        if self._run != "chunk":
            for item in FLAGS:
                setattr(args, item.dest, None)
            args.cuda_graph_granularity = "layer"
            args.cuda_graph_impl = "none" if self._run == "eager" else self._run
            args.optimizer_cuda_graph = False
            _choose_modules(args)
        self._settle(args)

    def _train_step(self, *args: Any, **kwargs: Any) -> Any:
        number = len(self._steps) + 1
        if number == 1 and not self._on_cpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        graphs = self._hooks.graphs
        if graphs is not None and number == self._num_warmup + self._num_steps + 1:
            graphs.engine.observe(self._late)
        begin = self._clock.mark()
        result = self._train(*args, **kwargs)
        end = self._clock.mark()
        norm = result[5]  # perhaps in a buffer of the optimizer's graph
        norm = norm.clone() if isinstance(norm, torch.Tensor) else norm
        self._steps.append((begin, end, result[0], norm))
        if number == self._num_all:
            self._write()
            of_run = self._get_args()
            of_run.exit_interval = of_run.curr_iteration + 1
        return result

    def _write(self) -> None:
        torch.cuda.synchronize()  # nothing on a CPU host
        graphs, args = self._hooks.graphs, self._get_args()
        report = graphs and graphs.engine.report
        times = [self._clock.ms_between(begin, end) for begin, end, *_ in self._steps]
        record = {
            "step_ms": times[self._num_warmup : self._num_warmup + self._num_steps],
            # Of all steps, to the last bit.
            "values": [
                [float(value).hex() for value in (*losses.values(), norm or 0.0)]
                for _, _, losses, norm in self._steps
            ],
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "capture_ms": report.duration_ms if report else None,
            "late_ms": self._late.total_ms() / _NUM_TRACED if report and not self._on_cpu else None,
            "hints": [] if self._on_cpu else hints(args),
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

    Args:
        clock: The clock of the device.
        tell: Function to call with the median of their times, in ms.
    """

    def __init__(self, clock: StepClock, tell: Callable[[float], None]) -> None:
        self._clock, self._tell = clock, tell
        self._marks: list[Any] = []
        self._is_told = False

    def step(self, *, is_replayed: bool) -> None:
        """Mark the end of a step."""
        if self._is_told:
            return
        if len(self._marks) <= _NUM_ANNOUNCED:
            self._marks = [*(self._marks if is_replayed else ()), self._clock.mark()]
        elif self._clock.is_past(self._marks[-1]):
            self._is_told = True
            times = map(self._clock.ms_between, self._marks, self._marks[1:])
            self._tell(statistics.median(times))


_HINTS = {
    "cross_entropy_loss_fusion": "add --cross-entropy-loss-fusion: the loss then passes over the "
    "logits less often",
    "gradient_accumulation_fusion": "leave out --no-gradient-accumulation-fusion: weight gradients "
    "are then added without kernels of their own",
}
"""What makes a step slow and is a flag away, by the argument of Megatron that is off."""


def hints(args: argparse.Namespace) -> list[str]:
    """Return sentences about work of every step that one of Megatron's flags saves."""
    found = [text for name, text in _HINTS.items() if getattr(args, name, True) is False]
    return [f"Faster, with other rounding: {text}." for text in found]

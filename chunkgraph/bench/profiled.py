"""Profile a few steps, with marks that assign kernels to chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkgraph.bench.trace import PREFIX, KernelTimes, kernel_times

__all__ = ["marked", "profile_steps"]

ForwardStep = Callable[..., Any]


def profile_steps(run_step: Callable[[], object], num_steps: int, trace: Path) -> KernelTimes:
    """Run steps under the profiler.

    Args:
        run_step: Function that runs a whole step, marked as one, and synchronizes the device.
        num_steps: Number of steps to profile, after one step without the profiler.
        trace: Path of the trace.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run_step()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(num_steps):
            run_step()
    profiler.export_chrome_trace(str(trace))
    with trace.open(encoding="utf-8", errors="replace") as file:
        return kernel_times(json.load(file)["traceEvents"])


def marked(forward_step: ForwardStep, chunks: Sequence[nn.Module]) -> ForwardStep:
    """Wrap a forward step with marks of forwards, losses and backwards in the profiler's trace."""
    index = {id(chunk): number for number, chunk in enumerate(chunks)}

    def marked_forward_step(data: Any, chunk: nn.Module) -> tuple[torch.Tensor, Any]:
        number = index[id(chunk)]
        with torch.profiler.record_function(f"{PREFIX}forward {number}"):
            output, loss_function = forward_step(data, chunk)
        if output.requires_grad:
            output.register_hook(lambda _: _mark(f"{PREFIX}backward {number}"))

        def marked_loss(losses: torch.Tensor) -> Any:
            with torch.profiler.record_function(f"{PREFIX}forward {number}"):
                return loss_function(losses)

        return output, marked_loss

    return marked_forward_step


def _mark(name: str) -> None:
    with torch.profiler.record_function(name):
        pass

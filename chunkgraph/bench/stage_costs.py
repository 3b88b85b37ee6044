"""Time the graphs of one stage by themselves, F, B, I and W, and count their GEMMs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from chunkgraph.bench.chunk_costs import chunk_costs, chunk_graphs
from chunkgraph.engine import Chunk, ChunkGraphs

__all__ = ["stage_costs"]

_GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|wgrad_alg|xmma", re.IGNORECASE)
# Attention's kernels have types of CUTLASS in their names.
_OTHER_KERNEL = re.compile(r"flash|fmha|attention|reduce", re.IGNORECASE)
_GEMM_OPERATORS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def stage_costs(
    module: nn.Module, x: torch.Tensor, *, is_split: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """Capture a stage in the middle of a pipeline, and measure its graphs.

    Args:
        module: The stage.
        x: Its input, whose gradient is computed.
        is_split: Whether the backward is split.

    Returns:
        The ms, and the numbers of GEMMs, of F and B, or of F, I and W.
    """
    chunk = Chunk.from_module(module, "stage", backward="split" if is_split else "whole")
    graphs = ChunkGraphs([chunk], 1)
    graphs.capture([x.requires_grad_()])
    (costs,) = chunk_costs(graphs, x.device)
    gemms = {kind: _num_gemms(one, x.device) for kind, one in chunk_graphs(graphs)[0].items()}
    graphs.release()
    return costs, gemms


def _num_gemms(graph: Any, device: torch.device) -> int:
    """Count the GEMMs of a replay in a profile: kernels on a GPU, operators on a CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.no_grad(), torch.profiler.profile(activities=activities) as profiler:
        graph.replay()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    names = [
        event.name
        for event in profiler.events()
        if (event.device_type == DeviceType.CUDA) == (device.type == "cuda")
    ]
    if device.type == "cpu":
        return sum(name in _GEMM_OPERATORS for name in names)
    return sum(bool(_GEMM_KERNEL.search(n)) and not _OTHER_KERNEL.search(n) for n in names)

"""Times of one stage's graphs, F, B, I and W, and the steps that they make in a simulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch_layers import torch_layer, transformer_engine_layer

from chunkgraph.bench.chunk_costs import chunk_costs, chunk_graphs
from chunkgraph.bench.simulated import cost_model, simulated_step_ms
from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.schedules import get_family

__all__ = ["as_text", "simulate_stage"]

# Ranks and microbatches.
_PIPELINES = ((2, 8), (4, 8), (4, 16), (8, 16))
_SCHEDULES = ("1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v")
_GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|wgrad_alg|xmma", re.IGNORECASE)
# Attention's kernels have types of CUTLASS in their names.
_OTHER_KERNEL = re.compile(r"flash|fmha|attention|reduce", re.IGNORECASE)
_GEMM_OPERATORS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}

MakeLayer = Callable[..., nn.Module]


def simulate_stage(
    num_layers: int, width: int, num_heads: int, sequence: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measure a stage of torch's layers, and one of Transformer Engine's if it is installed.

    Args:
        num_layers: of the stage.
        width: of the hidden state.
        num_heads: of attention.
        sequence: tokens of a microbatch.
        device: where the graphs run.

    Returns:
        For each kind of layers ms and numbers of GEMMs of F, B, I and W, and for each pipeline the
        step of each schedule as a share of 1F1B.
    """

    def torch_stage(*, delays_weights: bool) -> nn.Module:  # noqa: ARG001
        return torch_layer(width, num_heads)

    def engine_stage(*, delays_weights: bool) -> nn.Module:
        return transformer_engine_layer(width, num_heads, delays_weights=delays_weights)

    rows = []
    # Transformer Engine first: it loads a cuDNN that must be the first of the process.
    for name, make in (("Transformer Engine", engine_stage), ("torch", torch_stage)):
        try:
            rows.append(_measured(name, make, num_layers, (1, sequence, width), device))
        except ImportError as error:
            rows.append({"layers": name, "skipped": str(error)})
    return rows


def _measured(
    name: str, make: MakeLayer, num_layers: int, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    costs: dict[str, float] = {}
    gemms: dict[str, int] = {}
    for backward in ("whole", "split"):
        torch.manual_seed(0)
        with device:
            layers = [make(delays_weights=backward == "split") for _ in range(num_layers)]
            x = torch.randn(shape, dtype=dtype).requires_grad_()
        module = nn.Sequential(*layers).to(dtype)
        graphs = ChunkGraphs([Chunk.from_module(module, "stage", backward=backward)], 1)
        graphs.capture([x])
        costs |= chunk_costs(graphs, device)[0]
        gemms |= {kind: _num_gemms(g, device) for kind, g in chunk_graphs(graphs)[0].items()}
        graphs.release()
    return {
        "layers": name,
        "costs_ms": costs,
        "num_gemms": gemms,
        "halves_of_backward": (costs["I"] + costs["W"]) / costs["B"],
        "share_of_1f1b": _shares(costs),
    }


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
        if (event.device_type == torch.autograd.DeviceType.CUDA) == (device.type == "cuda")
    ]
    if device.type == "cpu":
        return sum(name in _GEMM_OPERATORS for name in names)
    return sum(bool(_GEMM_KERNEL.search(n)) and not _OTHER_KERNEL.search(n) for n in names)


def _shares(costs: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return each schedule's step as a share of 1F1B, with the same layers on every rank."""
    shares: dict[str, dict[str, float]] = {}
    for num_ranks, num_microbatches in _PIPELINES:
        steps = {}
        for name in _SCHEDULES:
            family = get_family(name)
            # A chunk whose backward is split has no other graph for a whole one.
            whole = {} if family.splits_backward else {"B": costs["B"]}
            model = cost_model({**{n: costs[n] for n in "FIW"}, **whole})
            num_chunks = family.num_chunks or 2
            steps[name] = simulated_step_ms(
                name, model.scaled(1 / num_chunks), num_ranks, num_chunks, num_microbatches
            )
        shares[f"{num_ranks},{num_microbatches}"] = {
            name: step / steps["1f1b"] for name, step in steps.items()
        }
    return shares


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return a text of the results."""
    lines = []
    for row in rows:
        if "skipped" in row:
            lines.append(f"{row['layers']} layers: skipped, {row['skipped']}")
            continue
        for name, unit in (("costs_ms", "ms"), ("num_gemms", "GEMMs")):
            values = ", ".join(f"{kind} {value:.4g}" for kind, value in row[name].items())
            lines.append(f"{row['layers']} layers, {unit}: {values}")
        lines.append(f"{row['layers']} layers: I + W is {row['halves_of_backward']:.3f} of B")
        lines.append(" ".join([f"{'step, of 1f1b':>14}", *[f"{n:>14}" for n in _SCHEDULES]]))
        for pipeline, shares in row["share_of_1f1b"].items():
            values = [f"{shares[name]:14.3f}" for name in _SCHEDULES]
            lines.append(" ".join([f"P,M = {pipeline:>8}", *values]))
    return "\n".join(lines) + "\n"

"""Eager schedules of torch.distributed.pipelining against the same ones on captured stages.

    torchrun --nproc-per-node 4 benchmarks/torch_pipelines.py --json torch_pipelines.json

A transformer, with as many layers on every rank, trains by each schedule class: first as torch
alone runs it, then with graphs, from the same weights on the same data. Losses, gradients of the
last step and parameters are compared to the last bit, also with eager 1F1B. Runs on GPUs (NCCL), or
without them on CPUs (gloo), where only the comparison means something. Exits with 1 if a schedule
differs from eager.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chunkgraph.pipelining import GraphedSchedule, GraphedStage

# By class: stages on each rank.
SCHEDULES = {
    "Schedule1F1B": 1,
    "ScheduleGPipe": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
_V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Layer(nn.Module):
    """A transformer layer with causal attention, normalized first."""

    def __init__(self, number: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.number, self.num_heads = number, num_heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then apply the MLP."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        attended = nn.functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


@dataclass(frozen=True)
class Size:
    """The options of the command that both runs of a schedule have."""

    layers_per_rank: int
    width: int
    num_heads: int
    sequence: int
    num_microbatches: int
    num_warmup_steps: int
    num_steps: int


@dataclass
class Run:
    """One run of a schedule on this rank.

    Attributes:
        step_ms: times of the measured steps.
        losses: of all microbatches of all steps; only on the rank of the last stage.
        digests: of the last gradients and of the parameters, by layer of the whole model.
        counters: of the graphs; empty without them.
        reserved_bytes: most memory of the measured steps; 0 on a CPU.
    """

    step_ms: list[float]
    losses: list[str]
    digests: dict[int, str]
    counters: dict[str, int]
    reserved_bytes: int


def _stage_indices(schedule: str, rank: int, num_ranks: int) -> list[int]:
    if schedule in _V_SHAPED:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + chunk * num_ranks for chunk in range(SCHEDULES[schedule])]


def _layers(size: Size, stage: int, num_stages: int, device: torch.device) -> nn.Sequential:
    """Make the layers of a stage; those of the whole model depend on their number alone."""
    per_stage = size.layers_per_rank * dist.get_world_size() // num_stages
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    layers = []
    for number in range(stage * per_stage, (stage + 1) * per_stage):
        torch.manual_seed(number)
        layers.append(Layer(number, size.width, size.num_heads).to(device, dtype))
    return nn.Sequential(*layers)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def _gathered_run(
    schedule: str, size: Size, device: torch.device, *, has_graphs: bool
) -> list[Run]:
    """Run on all ranks, with the memory that an earlier run left free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    runs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(runs, _run(schedule, size, device, has_graphs=has_graphs))
    return runs


def _run(schedule: str, size: Size, device: torch.device, *, has_graphs: bool) -> Run:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    indices = _stage_indices(schedule, rank, num_ranks)
    num_stages = num_ranks * len(indices)
    modules = [_layers(size, index, num_stages, device) for index in indices]
    kind = GraphedStage if has_graphs else pipelining.PipelineStage
    stages: Any = [
        kind(module, index, num_stages, device)
        for module, index in zip(modules, indices, strict=True)
    ]
    cls = getattr(pipelining, schedule)
    local = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages

    def make(count: int) -> Any:
        return cls(local, count, loss_fn=_loss)

    graphed = GraphedSchedule(stages, make, [size.num_microbatches]) if has_graphs else None
    step = graphed.step if graphed is not None else make(size.num_microbatches).step
    run = Run([], [], {}, {}, 0)
    _train(
        step, modules, size, device, run, is_first=0 in indices, is_last=num_stages - 1 in indices
    )
    if graphed is not None:
        counters = graphed.graphs.counters
        names = ("captures", "replays", "backward_replays", "weight_replays", "replayed_steps")
        run.counters = {name: getattr(counters, name) for name in names}
    if device.type == "cuda":
        run.reserved_bytes = torch.cuda.max_memory_reserved(device)
    for layer in (layer for module in modules for layer in module if isinstance(layer, Layer)):
        tensors = [t for p in layer.parameters() for t in (p.grad, p.detach())]
        run.digests[layer.number] = _digest(tensors)
    if graphed is not None:
        graphed.graphs.release()
    return run


def _train(
    step: Callable[..., Any],
    modules: Sequence[nn.Module],
    size: Size,
    device: torch.device,
    run: Run,
    *,
    is_first: bool,
    is_last: bool,
) -> None:
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)
    for number, (x, target) in enumerate(_batches(size, modules[0], device)):
        losses: list[torch.Tensor] = []
        if number == size.num_warmup_steps and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        optimizer.zero_grad()
        options = {"target": target, "losses": losses} if is_last else {}
        step(*([x] if is_first else []), return_outputs=False, **options)
        optimizer.step()
        _synchronize(device)
        if number >= size.num_warmup_steps:
            run.step_ms.append((time.perf_counter() - started) * 1e3)
        run.losses += [loss.item().hex() for loss in losses]


def _batches(
    size: Size, module: nn.Module, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    for _ in range(size.num_warmup_steps + size.num_steps):
        shape = (2, size.num_microbatches, size.sequence, size.width)
        yield torch.randn(shape, generator=generator).to(device, dtype).unbind()


def _digest(tensors: Sequence[torch.Tensor | None]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _results(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what a step gave, the same on all ranks and for all splits into stages."""
    return {
        "losses": [loss for run in runs for loss in run.losses],
        "digests": {number: value for run in runs for number, value in run.digests.items()},
    }


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return times of the slowest rank, and the rest by rank."""
    steps = [max(times) for times in zip(*[run.step_ms for run in runs], strict=True)]
    return {
        "step_ms": statistics.median(steps),
        "step_ms_all": steps,
        "reserved_bytes_by_rank": [run.reserved_bytes for run in runs],
        "counters_by_rank": [run.counters for run in runs],
    }


def _compare(size: Size, names: Sequence[str], device: torch.device) -> list[dict[str, Any]]:
    base: dict[str, Any] | None = None
    compared = []
    for name in names:
        eager, graphs = (
            _gathered_run(name, size, device, has_graphs=has_graphs) for has_graphs in (False, True)
        )
        if name == "Schedule1F1B":
            base = _results(eager)
        compared.append(
            {
                "schedule": name,
                "eager": _summary(eager),
                "graphs": _summary(graphs),
                "equal_to_eager": _results(graphs) == _results(eager),
                "equal_to_eager_1f1b": None if base is None else _results(graphs) == base,
            }
        )
    return compared


def _print(compared: Sequence[dict[str, Any]]) -> None:
    lines = [f"{'schedule':30} {'eager ms':>10} {'graphs ms':>10} {'of eager':>9} equal"]
    for row in compared:
        eager, graphs = row["eager"]["step_ms"], row["graphs"]["step_ms"]
        shown = "yes" if row["equal_to_eager"] else "NO"
        times = f"{eager:10.2f} {graphs:10.2f} {graphs / eager:9.3f}"
        lines.append(f"{row['schedule']:30} {times} {shown}")
    sys.stdout.write("\n".join(lines) + "\n")


def main() -> int:
    """Run the command on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--layers-per-rank", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--num-warmup-steps", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = vars(parser.parse_args())
    names, path = options.pop("schedules"), options.pop("json")
    size = Size(**options)
    if size.num_warmup_steps < 2:
        parser.error("--num-warmup-steps must be 2 or more: the second step captures")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    compared = _compare(size, names, device)
    if dist.get_rank() == 0:
        _print(compared)
        document = {
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "num_ranks": dist.get_world_size(),
            "torch": torch.__version__,
            "settings": options,
            "schedules": compared,
        }
        if path is not None:
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return int(not all(row["equal_to_eager"] for row in compared))


if __name__ == "__main__":
    sys.exit(main())

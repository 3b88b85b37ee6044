"""Time torch's schedule classes with and without graphs, and the graphs of a stage.

    torchrun --nproc-per-node 2 benchmarks/torch_pipelines.py --json torch_pp2.json

A plain transformer, the same under every schedule. Each schedule runs eagerly and with graphs, in
turns for `--rounds` rounds; losses and parameters are compared with eager 1F1B to the last bit.
The graphs F, B, I and W of a stage in the middle of a pipeline, with a rank's layers, are timed by
themselves. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from chunkgraph import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.split import SPLIT, DelayedModules
from chunkgraph.pipelining import GraphedSchedule, GraphedStage
from chunkgraph.schedules import get_family, stage_of

CLASSES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
_NUM_REPLAYS = 20


class Layer(nn.Module):
    """A transformer layer with causal attention, normalized first, of torch's modules or TE's."""

    def __init__(self, args: argparse.Namespace, *, delays_weights: bool) -> None:
        super().__init__()
        width, ffn, self.num_heads = args.hidden_size, args.ffn_hidden_size, args.num_heads
        if args.transformer_engine:
            te: Any = importlib.import_module("transformer_engine.pytorch")
            options = {"bias": False, "delay_wgrad_compute": delays_weights}
            self.qkv = te.LayerNormLinear(width, 3 * width, **options)
            self.out = te.Linear(width, width, **options)
            self.mlp = te.LayerNormMLP(width, ffn, **options)
        else:
            self.qkv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
            self.out = nn.Linear(width, width)
            up, down = nn.Linear(width, ffn), nn.Linear(ffn, width)
            self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then apply the MLP."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        attended = nn.functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


@dataclass
class Result:
    """What a schedule took, eagerly or with graphs, over all rounds.

    Attributes:
        step_ms: Time of each measured step on the slowest rank.
        reserved_bytes: The peak of reserved memory on the fullest rank; 0 on a CPU.
        digests: Hash of the last parameters and all losses, one a round.
    """

    step_ms: list[float] = field(default_factory=list)
    reserved_bytes: int = 0
    digests: list[str] = field(default_factory=list)


class Run:
    """One schedule on this rank, eagerly or with graphs."""

    def __init__(
        self, args: argparse.Namespace, device: torch.device, name: str, *, has_graphs: bool
    ) -> None:
        self._args, self._device = args, device
        rank, size = dist.get_rank(), dist.get_world_size()
        family = get_family(name)
        num_chunks = family.num_chunks or 2
        indices = [stage_of(rank, c, size, family.placement) for c in range(num_chunks)]
        num_stages = size * num_chunks
        self._layers = {
            i: make_layers(args, i, num_stages, family.splits_backward) for i in indices
        }
        stages: Any = [
            GraphedStage(layers, index, num_stages, device)
            if has_graphs
            else pipelining.PipelineStage(
                layers, index, num_stages, device, dw_builder=_weight_gradients(layers)
            )
            for index, layers in self._layers.items()
        ]
        cls = getattr(pipelining, CLASSES[name])
        local = stages[0] if issubclass(cls, PipelineScheduleSingle) else stages
        make: Callable[[int], Any] = lambda count: cls(local, count, loss_fn=_loss)  # noqa: E731
        self._graphed: GraphedSchedule | None = None
        if has_graphs:
            options = CaptureOptions(num_warmup_steps=1, verify=args.verify)
            self._graphed = GraphedSchedule(stages, make, (args.num_microbatches,), options=options)
        self._schedule: Any = self._graphed or make(args.num_microbatches)
        parameters = [p for layers in self._layers.values() for p in layers.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.01)
        self._is_first, self._is_last = 0 in indices, num_stages - 1 in indices
        self._generator = torch.Generator(device).manual_seed(1)
        shape = (2, args.num_microbatches, args.seq_length, args.hidden_size)
        self._batch = torch.empty(shape, device=device, dtype=args.dtype)
        self._losses: list[float] = []

    def measure(self, result: Result) -> None:
        """Run all steps and add their times, memory and digest, the same on all ranks."""
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        times_ms = [self._step() for _ in range(self._args.num_warmup_steps + self._args.num_steps)]
        reserved = torch.cuda.max_memory_reserved(self._device) if is_gpu else 0
        digests = {index: [_digest(one) for one in self._layers[index]] for index in self._layers}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (times_ms, reserved, digests, self._losses))
        slowest = [max(of_step) for of_step in zip(*(one[0] for one in every), strict=True)]
        result.step_ms += slowest[self._args.num_warmup_steps :]
        result.reserved_bytes = max(result.reserved_bytes, *(one[1] for one in every), 0)
        by_stage = {index: value for one in every for index, value in one[2].items()}
        layers = [digest for _, of_stage in sorted(by_stage.items()) for digest in of_stage]
        losses = [loss.hex() for one in every for loss in one[3]]
        result.digests.append(hashlib.sha256(str((layers, losses)).encode()).hexdigest())

    def close(self) -> None:
        """Free the graphs."""
        if self._graphed is not None:
            self._graphed.graphs.release()

    def _step(self) -> float:
        x, target = self._batch.normal_(generator=self._generator).unbind()
        losses: list[torch.Tensor] = []
        arguments = [x] if self._is_first else []
        keywords = {"target": target, "losses": losses} if self._is_last else {}
        dist.barrier()
        _synchronize(self._device)
        started = time.perf_counter()
        self._optimizer.zero_grad()
        self._schedule.step(*arguments, return_outputs=False, **keywords)
        self._optimizer.step()
        _synchronize(self._device)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        self._losses += [loss.item() for loss in losses]
        return elapsed_ms


def make_layers(
    args: argparse.Namespace, stage: int, num_stages: int, delays_weights: bool
) -> nn.Sequential:
    """Make the layers of a stage; those of the whole model depend on their number alone."""
    per_stage = args.num_layers // num_stages
    default = torch.get_default_dtype()
    # A later cast would leave holes between the parameters, which a graph's pool cannot use.
    torch.set_default_dtype(args.dtype)
    layers = []
    for number in range(stage * per_stage, (stage + 1) * per_stage):
        torch.manual_seed(number)
        with torch.device(args.device):
            layers.append(Layer(args, delays_weights=delays_weights))
    torch.set_default_dtype(default)
    return nn.Sequential(*layers)


def graph_ms(args: argparse.Namespace, device: torch.device, *, is_split: bool) -> dict[str, float]:
    """Return the median ms of a stage's graphs: F and B, or F, I and W if it ``is_split``."""
    size = dist.get_world_size()
    module = make_layers(args, dist.get_rank(), size, is_split)
    x = torch.randn(1, args.seq_length, args.hidden_size, device=device, dtype=args.dtype)
    chunk = Chunk.from_module(module, "stage", program=SPLIT if is_split else None)
    graphs = ChunkGraphs([chunk], 1)
    graphs.capture([x.requires_grad_()])
    slot = graphs._captured.slots[0][0]  # type: ignore[union-attr]
    replays = slot.graphs
    times: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for _ in range(_NUM_REPLAYS):
            for name, graph in replays.items():
                if graph is None:
                    continue
                _synchronize(device)
                started = time.perf_counter()
                graph.replay()
                _synchronize(device)
                times[name].append((time.perf_counter() - started) * 1e3)
    graphs.release()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Measure all schedules; rank 0 prints the tables. Return the exit code."""
    args = _arguments()
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        args.device = str(device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    results: dict[str, Result] = {
        f"{kind} {name}": Result() for name in args.schedules for kind in ("eager", "graphs")
    }
    for _ in range(args.rounds):
        for key, result in results.items():
            kind, _, name = key.partition(" ")
            run = Run(args, device, name, has_graphs=kind == "graphs")
            run.measure(result)
            run.close()
            del run
            gc.collect()
    costs = graph_ms(args, device, is_split=False)
    if any(get_family(name).splits_backward for name in args.schedules):
        costs |= graph_ms(args, device, is_split=True)
    code = _report(args, results, costs) if dist.get_rank() == 0 else 0
    dist.destroy_process_group()
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument("--transformer-engine", action="store_true", help="its layers")
    for name, default in {
        "rounds": 2,
        "num-steps": 8,
        "num-warmup-steps": 3,
        "num-microbatches": 8,
        "num-layers": 8,
        "hidden-size": 2048,
        "ffn-hidden-size": 8192,
        "num-heads": 16,
        "seq-length": 1024,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="%(default)s")
    parser.add_argument("--dtype", default="bfloat16", type=lambda name: getattr(torch, name))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--verify", choices=("none", "poison", "shadow"), default="none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    return parser.parse_args()


def _report(args: argparse.Namespace, results: dict[str, Result], costs: dict[str, float]) -> int:
    """Print the tables and write the file; return 1 if anything differs."""
    first = results[f"eager {args.schedules[0]}"]
    rows = []
    print("| schedule | eager ms | graphs ms | of eager | reserved, of eager | equal |")
    print("|---|---|---|---|---|---|")
    for name in args.schedules:
        eager, graphs = results[f"eager {name}"], results[f"graphs {name}"]
        eager_ms, graphs_ms = statistics.median(eager.step_ms), statistics.median(graphs.step_ms)
        reserved = graphs.reserved_bytes / eager.reserved_bytes if eager.reserved_bytes else None
        is_equal = {*eager.digests, *graphs.digests} == {first.digests[0]}
        row = {"schedule": name, "eager_ms": eager_ms, "graphs_ms": graphs_ms}
        row |= {"of_eager": graphs_ms / eager_ms, "reserved_of_eager": reserved, "equal": is_equal}
        rows.append(row)
        memory = "-" if reserved is None else f"{reserved:.3f}"
        times = f"{eager_ms:.1f} | {graphs_ms:.1f} | {graphs_ms / eager_ms:.3f}"
        print(f"| {name} | {times} | {memory} | {'yes' if is_equal else 'NO'} |")
    print("graphs of a stage: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in costs.items()))
    if args.json is not None:
        document = {
            "command": " ".join(sys.argv),
            "num_ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
            "torch": torch.__version__,
            "schedules": rows,
            "costs_ms": costs,
            "step_ms": {key: result.step_ms for key, result in results.items()},
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["equal"] for row in rows) else 1


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


def _weight_gradients(stage: nn.Module) -> Callable[[], Callable[[], None]] | None:
    """Return torch's ``dw_builder`` for modules that delay weight gradients; None for others."""
    delayed = DelayedModules(stage, "stage")
    return (lambda: lambda: delayed.run(())) if delayed.modules else None


def _digest(layer: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in layer.parameters():
        value = parameter.detach().cpu().contiguous().view(-1)
        digest.update(value.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())

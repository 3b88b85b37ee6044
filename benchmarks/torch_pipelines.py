"""Eager schedules of torch.distributed.pipelining against the same ones on captured stages.

    torchrun --nproc-per-node 2 benchmarks/torch_pipelines.py --json torch_pipelines.json
    python benchmarks/torch_pipelines.py --simulate --json split_backward.json

A transformer, with as many layers on every rank, trains by each schedule class: first as torch
alone runs it, then with graphs, from the same weights on the same data. Losses, gradients of the
last step and parameters are compared to the last bit, also with eager 1F1B. Each class prints a
line and is added to the JSON file when it is done; one that takes longer than the time limit ends
the command with the places where its threads are. Runs on GPUs (NCCL), or without them on CPUs
(gloo), where only the comparison means something. Exits with 1 if a schedule differs from eager.

With ``--simulate`` one process times the graphs of one stage: F, B and its halves I and W. It
counts their GEMMs in a profile, and simulates steps of several schedules and pipeline sizes with
the times, for torch's layers and, if installed, Transformer Engine's with delayed weight gradients.
Exits with 1 if the halves have other GEMMs than the whole backward.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch_layers import torch_layer

from chunkgraph import CaptureOptions
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


@dataclass(frozen=True)
class Size:
    """The options of the command that both runs of a schedule have."""

    layers_per_rank: int
    width: int
    num_heads: int
    sequence: int
    num_microbatches: tuple[int, ...]
    num_warmup_steps: int
    num_steps: int
    verify: str
    evaluate: bool


@dataclass
class Run:
    """One run of a schedule on this rank.

    Attributes:
        step_ms: times of the measured steps.
        losses: of all microbatches of all steps; only on the rank of the last stage.
        eval_losses: of all microbatches of all evaluations; only on the rank of the last stage.
        digests: of the last gradients and of the parameters, by layer of the whole model.
        counters: of the graphs; empty without them.
        reserved_bytes: most memory of the measured steps; 0 on a CPU.
    """

    step_ms: list[float]
    losses: list[str]
    eval_losses: list[str]
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
        with device:
            layers.append(torch_layer(size.width, size.num_heads).to(dtype))
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

    graphed = None
    if has_graphs:
        options = CaptureOptions(verify=size.verify)
        graphed = GraphedSchedule(stages, make, size.num_microbatches, options=options)
    # Torch cannot evaluate with the V shapes: their backwards send gradients in any case.
    size = replace(size, evaluate=size.evaluate and schedule not in _V_SHAPED)
    run = Run([], [], [], {}, {}, 0)
    ends = {"is_first": 0 in indices, "is_last": num_stages - 1 in indices}
    _train(graphed or _Eager(make), modules, size, device, run, **ends)
    if graphed is not None:
        counters = graphed.graphs.counters
        names = (
            "captures",
            "capture_sessions",
            "replays",
            "backward_replays",
            "weight_replays",
            "replayed_steps",
        )
        run.counters = {name: getattr(counters, name) for name in names}
    if device.type == "cuda":
        run.reserved_bytes = torch.cuda.max_memory_reserved(device)
    for index, module in zip(indices, modules, strict=True):
        for number, layer in enumerate(module, index * len(module)):
            tensors = [t for p in layer.parameters() for t in (p.grad, p.detach())]
            run.digests[number] = _digest(tensors)
    if graphed is not None:
        graphed.graphs.release()
    return run


class _Eager:
    """Torch's schedules without graphs, as `GraphedSchedule`: a new one for another kind of step.

    Args:
        make: Function that creates the schedule for a number of microbatches.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._kind: tuple[int, bool] | None = None
        self._schedule: Any = None

    def step(self, *args: Any, num_microbatches: int, **kwargs: Any) -> Any:
        """Run one training step."""
        return self._of_kind(num_microbatches, is_training=True).step(*args, **kwargs)

    def eval(self, *args: Any, num_microbatches: int, **kwargs: Any) -> Any:
        """Run one evaluation step."""
        return self._of_kind(num_microbatches, is_training=False).eval(*args, **kwargs)

    def _of_kind(self, count: int, *, is_training: bool) -> Any:
        if self._kind != (count, is_training):
            self._kind, self._schedule = (count, is_training), self._make(count)
        return self._schedule


def _train(
    schedule: GraphedSchedule | _Eager,
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
        if number == size.num_warmup_steps - 1:
            _begin_memory_measurement(device)
        arguments = {
            "num_microbatches": len(x),
            **({"target": target, "losses": losses} if is_last else {}),
        }
        inputs = [x] if is_first else []
        if size.evaluate and number:
            with torch.no_grad():
                schedule.eval(*inputs, return_outputs=False, **arguments)
            run.eval_losses += [loss.item().hex() for loss in losses]
        dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        optimizer.zero_grad()
        schedule.step(*inputs, return_outputs=False, **arguments)
        optimizer.step()
        _synchronize(device)
        if number >= size.num_warmup_steps:
            run.step_ms.append((time.perf_counter() - started) * 1e3)
        run.losses += [loss.item().hex() for loss in losses]


def _batches(
    size: Size, module: nn.Module, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the input and the target of each step, [microbatches, sequence, width]."""
    dtype = next(module.parameters()).dtype
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, max(size.num_microbatches), size.sequence, size.width)
    # Both runs hold one batch; memory for each step's would come from that of eager activations.
    batch = torch.empty(shape, device=device, dtype=dtype)
    counts = itertools.cycle(size.num_microbatches)
    for count in itertools.islice(counts, size.num_warmup_steps + size.num_steps):
        yield batch.normal_(generator=generator)[:, :count].unbind()


def _begin_memory_measurement(device: torch.device) -> None:
    """Give back what earlier steps and the capture left cached, and begin to measure the peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


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
    """Return what the steps gave, the same on all ranks and for all splits into stages."""
    return {
        "losses": [loss for run in runs for loss in run.losses],
        "eval_losses": [loss for run in runs for loss in run.eval_losses],
        "digests": {number: value for run in runs for number, value in run.digests.items()},
    }


def _are_equal_in_training(results: dict[str, Any], base: dict[str, Any]) -> bool:
    """Compare with another schedule class, which torch may be able to evaluate with."""
    return all(results[name] == base[name] for name in ("losses", "digests"))


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return times of the slowest rank, and the rest by rank."""
    steps = [max(times) for times in zip(*[run.step_ms for run in runs], strict=True)]
    return {
        "step_ms": statistics.median(steps),
        "step_ms_all": steps,
        "reserved_bytes_by_rank": [run.reserved_bytes for run in runs],
        "counters_by_rank": [run.counters for run in runs],
    }


def _compare(
    name: str, size: Size, device: torch.device, base: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a schedule class both ways; return the comparison, and the results without graphs."""
    started = time.perf_counter()
    eager, graphs = (
        _gathered_run(name, size, device, has_graphs=has_graphs) for has_graphs in (False, True)
    )
    expected, results = _results(eager), _results(graphs)
    row = {
        "schedule": name,
        "eager": _summary(eager),
        "graphs": _summary(graphs),
        "equal_to_eager": results == expected,
        "equal_to_eager_1f1b": None if base is None else _are_equal_in_training(results, base),
        "duration_s": time.perf_counter() - started,
    }
    bytes_of = [row[kind]["reserved_bytes_by_rank"] for kind in ("graphs", "eager")]
    if all(map(all, bytes_of)):
        row["reserved_of_eager"] = max(a / b for a, b in zip(*bytes_of, strict=True))
    return row, expected


def _line(row: dict[str, Any]) -> str:
    eager, graphs = row["eager"]["step_ms"], row["graphs"]["step_ms"]
    memory = f"{row['reserved_of_eager']:9.3f}" if "reserved_of_eager" in row else f"{'-':>9}"
    equal = "yes" if row["equal_to_eager"] else "NO"
    times = f"{eager:10.2f} {graphs:10.2f} {graphs / eager:9.3f} {memory}"
    return f"{row['schedule']:30} {times} {equal:>5} {row['duration_s']:8.1f}"


def _write(text: str) -> None:
    """Print on the first rank, at once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()


def _compare_all(
    names: Sequence[str], size: Size, device: torch.device, limit_s: float, path: Path | None
) -> bool:
    """Run all schedule classes; return whether all were equal."""
    base = None
    document = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "num_ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "settings": asdict(size),
        "schedules": [],
    }
    header = f"{'schedule':30} {'eager ms':>10} {'graphs ms':>10} {'of eager':>9} {'reserved':>9}"
    _write(f"{header} equal  seconds\n")
    for name in names:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        row, expected = _compare(name, size, device, base)
        faulthandler.cancel_dump_traceback_later()
        if name == "Schedule1F1B":
            base = expected
            row["equal_to_eager_1f1b"] = row["equal_to_eager"]
        document["schedules"].append(row)
        _write(_line(row) + "\n")
        if path is not None and dist.get_rank() == 0:
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return all(row["equal_to_eager"] for row in document["schedules"])


def _simulate(size: Size, device: torch.device, path: Path | None) -> bool:
    """Time one stage, and simulate; return whether halves of backwards have the same GEMMs."""
    from split_backward import as_text, simulate_stage

    rows = simulate_stage(size.layers_per_rank, size.width, size.num_heads, size.sequence, device)
    document = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "settings": asdict(size),
        "stages": rows,
    }
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _write(as_text(rows))
    gemms = [row["num_gemms"] for row in rows if "num_gemms" in row]
    return all(n["I"] + n["W"] == n["B"] for n in gemms)


def _device() -> torch.device:
    """Return the device of this rank, with deterministic kernels on GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # With NCCL_MULTI_RANK_GPU_ENABLE=1 ranks may share a GPU.
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # kernels that train nothing
    return device


def main() -> int:
    """Run the command on one rank."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--layers-per-rank", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument(
        "--num-microbatches", type=int, nargs="+", default=[8], help="of each step, repeated"
    )
    parser.add_argument("--evaluate", action="store_true", help="evaluate between steps")
    parser.add_argument("--num-warmup-steps", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--verify", choices=("none", "poison", "shadow"), default="none")
    parser.add_argument("--time-limit", type=float, default=60, help="seconds for each schedule")
    parser.add_argument("--simulate", action="store_true", help="time and simulate one stage")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = vars(parser.parse_args())
    names, path = options.pop("schedules"), options.pop("json")
    limit_s, simulates = options.pop("time_limit"), options.pop("simulate")
    size = Size(**{**options, "num_microbatches": tuple(options["num_microbatches"])})
    if size.num_warmup_steps < 3:
        parser.error("--num-warmup-steps must be 3 or more: the second step captures")
    device = _device()
    if simulates:
        return int(not _simulate(size, device, path))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=max(60, 2 * limit_s)),
        device_id=device if device.type == "cuda" else None,
    )
    are_equal = _compare_all(names, size, device, limit_s, path)
    dist.destroy_process_group()
    return int(not are_equal)


if __name__ == "__main__":
    sys.exit(main())

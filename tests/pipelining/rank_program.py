"""Runs all cases for some numbers of ranks: ``rank_program.py FOLDER SIZE...``.

Every case trains a model of two blocks per rank, cut into the schedule's stages, with and without
graphs, and compares the two. The test compares the ranks' files in FOLDER between schedules. Ranks
are forked, one size after the other, from a process that has imported torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch_release import HAS_LOCAL_STAGES

from chunkgraph import CaptureOptions
from chunkgraph.jobs.processes import die_with_parent
from chunkgraph.pipelining import GraphedSchedule, GraphedStage

WIDTH, ROWS = 8, 2
COUNTS = (4, 8, 6, 4)
MORE = (8, 12, 10, 8)
# Torch cannot evaluate with these: their backwards send gradients in any case.
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Blocks(nn.Module):
    """A stage of some blocks, named by their numbers in the whole model."""

    def __init__(self, indices: range, *, drops: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(i): Block(i) for i in indices})
        self.drop = nn.Dropout(0.2 if drops else 0.0)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x, scale)
        return self.drop(x)


class WatchedStage(GraphedStage):
    """Counts received inputs that are kept for the backward outside of the slots, in replays."""

    num_elsewhere = 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        own = self.replays
        if own is not None and own.is_replayed and self.has_backward and not self.is_first:
            slots = own._graphs._captured.slots[own._index]
            places = {t.data_ptr() for slot in slots for t in slot.inputs.tensors}
            if hasattr(self, "fwd_cache"):
                inputs = self.fwd_cache[fwd_chunk_id][1]
            else:  # torch 2.15
                inputs = self._forward_chunk_states[fwd_chunk_id].input_values
            received = inputs[: len(self.args_recv_info[fwd_chunk_id])]
            self.num_elsewhere += sum(t.data_ptr() not in places for t in received)
        return result


@dataclass(frozen=True)
class Case:
    name: str
    schedule: str
    num_local: int = 1
    counts: tuple[int, ...] = COUNTS
    options: dict[str, Any] = field(default_factory=dict)
    stage: type = WatchedStage
    schedule_options: dict[str, Any] = field(default_factory=dict)
    has_scale: bool = False
    drops: bool = False
    data_parallel: int = 1
    sharded: MixedPrecisionPolicy | None = None
    is_static: bool = False
    csv: bool = False
    frozen: tuple[int, ...] = ()  # stages without trainable parameters
    lora: bool = False  # the other stages train adapters alone


_SOME = (3, 2, 8, 6, 4)
_ANY = (*_SOME, 9, 7, 5)
_CLASSES = (
    ("1f1b", "Schedule1F1B", 1, _ANY),
    ("gpipe", "ScheduleGPipe", 1, _ANY),
    ("interleaved", "ScheduleInterleaved1F1B", 2, _SOME),
    ("zero bubble", "ScheduleInterleavedZeroBubble", 2, _SOME),
    ("zero bubble v", "ScheduleZBVZeroBubble", 2, _ANY),
)
_LORA = [
    case
    for name, cls, num_local, counts in _CLASSES
    if importlib.util.find_spec("peft") is not None
    for case in (
        Case(f"lora all {name}", cls, num_local, counts=counts, lora=True, drops=True),
        Case(
            f"lora last {name}",
            cls,
            num_local,
            # Of several stages those of "interleaved", with which the others are compared.
            counts=_ANY if num_local == 1 else _SOME,
            frozen=tuple(range(2 * num_local - 1)),
            lora=True,
        ),
    )
]
_FROZEN = [
    Case(f"frozen {where} {name}", schedule, num_local, frozen=frozen)
    for name, schedule, num_local, _ in _CLASSES
    for where, frozen in (
        ("first", (0,)),
        ("last", (2 * num_local - 1,)),
        *([("middle", (1, 2))] if num_local == 2 else []),
    )
]
CASES = {
    2: [
        Case("1f1b", "Schedule1F1B"),
        Case(
            "1f1b kwargs",
            "Schedule1F1B",
            has_scale=True,
            drops=True,
            schedule_options={"scale_grads": False},
            # The same schedule before and after an evaluation with another one.
            counts=(4, 8, 8, 6, 4),
        ),
        Case("1f1b static", "Schedule1F1B", is_static=True, stage=pipelining.PipelineStage),
        Case("1f1b shadow", "Schedule1F1B", options={"verify": "shadow"}, counts=(4, 2)),
        Case("gpipe", "ScheduleGPipe"),
        Case("looped bfs", "ScheduleLoopedBFS", 2),
        Case("interleaved", "ScheduleInterleaved1F1B", 2, options={"can_sleep": True}),
        Case("interleaved shared", "ScheduleInterleaved1F1B", 2, options={"shared_slots": True}),
        Case("zero bubble", "ScheduleInterleavedZeroBubble"),
        Case("interleaved zero bubble", "ScheduleInterleavedZeroBubble", 2),
        Case("zero bubble v", "ScheduleZBVZeroBubble", 2, options={"can_sleep": True}),
        Case(
            "zero bubble v shared",
            "ScheduleZBVZeroBubble",
            2,
            options={"shared_slots": True, "verify": "poison"},
        ),
        Case("dual pipe v", "ScheduleDualPipeV", 2),
        Case("dual pipe v repeated", "ScheduleDualPipeV", 2, counts=(4, 4, 4)),
        Case(
            "zero bubble shadow",
            "ScheduleZBVZeroBubble",
            2,
            options={"verify": "shadow"},
            counts=(4, 6),
        ),
        Case("csv", "ScheduleInterleaved1F1B", 2, csv=True),
        Case("interleaved paged", "ScheduleInterleaved1F1B", 2, options={"max_slots": 2}),
        *_FROZEN,
        *_LORA,
    ],
    4: [
        Case("1f1b", "Schedule1F1B"),
        Case("1f1b of more", "Schedule1F1B", counts=MORE),
        Case("interleaved", "ScheduleInterleaved1F1B", 2),
        Case("interleaved zero bubble", "ScheduleInterleavedZeroBubble", 2),
        Case("zero bubble v", "ScheduleZBVZeroBubble", 2),
        Case("dual pipe v", "ScheduleDualPipeV", 2, counts=MORE),
        Case("1f1b paged", "Schedule1F1B", options={"max_slots": 2}),
        Case(
            "frozen first paged",
            "ScheduleInterleaved1F1B",
            2,
            frozen=(0,),
            options={"max_slots": 2, "can_sleep": True},
        ),
        Case("zero bubble paged", "ScheduleInterleavedZeroBubble", 2, options={"max_slots": 5}),
        Case("zero bubble v paged", "ScheduleZBVZeroBubble", 2, options={"max_slots": 4}),
        Case("dual pipe v paged", "ScheduleDualPipeV", 2, MORE, {"max_slots": 2}),
        Case(
            "data parallel",
            "Schedule1F1B",
            data_parallel=2,
            is_static=True,
            options={"num_warmup_steps": 2},
        ),
        Case(
            "data parallel interleaved",
            "ScheduleInterleaved1F1B",
            2,
            data_parallel=2,
            is_static=True,
            options={"num_warmup_steps": 2},
        ),
    ],
}
if not HAS_LOCAL_STAGES:
    CASES = {n: [case for case in CASES[n] if case.schedule not in V_SHAPED] for n in CASES}
# Torch releases before 2.15 free unsharded parameters.
if hasattr(FSDPModule, "set_keep_unsharded_storage"):
    _MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    CASES[4] += [
        Case("sharded data", "Schedule1F1B", data_parallel=2, sharded=MixedPrecisionPolicy()),
        Case("sharded data mixed", "Schedule1F1B", data_parallel=2, sharded=_MIXED),
        Case(
            "sharded data interleaved",
            "ScheduleInterleaved1F1B",
            2,
            data_parallel=2,
            sharded=_MIXED,
            options={"verify": "shadow"},
            counts=(4, 6, 4),
        ),
        Case(
            "sharded data zero bubble",
            "ScheduleZBVZeroBubble",
            2,
            data_parallel=2,
            sharded=_MIXED,
        ),
    ]


@dataclass
class Place:
    """The position of this rank in a case."""

    rank: int
    size: int
    replica: int
    pipeline: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None


def make_stages(case: Case, place: Place, kind: type) -> list[Any]:
    num_stages = place.size * case.num_local
    if case.schedule in V_SHAPED:
        indices = [place.rank, num_stages - 1 - place.rank]
    else:
        indices = [place.rank + v * place.size for v in range(case.num_local)]
    per_stage = 2 * place.size // num_stages
    stages = []
    for i in indices:
        module: nn.Module = Blocks(
            range(i * per_stage, (i + 1) * per_stage), drops=case.drops and i == 0
        )
        module.requires_grad_(i not in case.frozen and not case.lora)
        if case.lora and i not in case.frozen:
            module = with_adapters(module, i, 0.1 if case.drops else 0.0)
        if case.sharded is not None:
            shard(module, case.sharded, place)
        elif place.replicas is not None:
            module = nn.parallel.DistributedDataParallel(
                module, process_group=place.replicas, bucket_cap_mb=0.001
            )
        sample = torch.zeros(ROWS, WIDTH, requires_grad=True)
        args: dict[str, Any] = {}
        if case.is_static:
            args |= {"input_args": sample, "output_args": sample}
        if case.sharded is not None and kind is pipelining.PipelineStage:
            # Torch 2.15 loses gradients of sharded stages if it splits a backward by itself.
            args["dw_builder"] = lambda: lambda: None
        device = torch.device("cpu")
        stages.append(kind(module, i, num_stages, device, group=place.pipeline, **args))
    return stages


def with_adapters(module: nn.Module, seed: int, dropout: float) -> Any:
    peft = importlib.import_module("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=2, target_modules=["up", "down"], lora_dropout=dropout, init_lora_weights=False
    )
    return peft.get_peft_model(module, config)


def evaluate_merged(modules: nn.ModuleList) -> list[torch.Tensor]:
    """Return what each stage computes after its adapters were merged, then take them out again."""
    adapted = [module for module in modules if hasattr(module, "merge_adapter")]
    for module in adapted:
        module.merge_adapter()
    outputs = [module(torch.ones(ROWS, WIDTH)) for module in modules]
    for module in adapted:
        module.unmerge_adapter()
    return outputs


def shard(module: nn.Module, policy: MixedPrecisionPolicy, place: Place) -> None:
    mesh = DeviceMesh.from_group(place.replicas, "cpu")
    for part in (*module.blocks.values(), module):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def maker(case: Case, stages: list[Any], folder: Path) -> Callable[[int], Any]:
    cls = getattr(pipelining, case.schedule)
    stage_or_stages = (
        stages[0] if issubclass(cls, pipelining.schedules.PipelineScheduleSingle) else stages
    )

    def make(count: int) -> Any:
        schedule = cls(stage_or_stages, count, loss_fn=loss_fn, **case.schedule_options)
        if not case.csv:
            return schedule
        path = folder / f"order{dist.get_rank()}.csv"
        schedule._dump_csv(str(path), "compute_only")
        runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss_fn)
        runtime._load_csv(str(path))
        return runtime

    return make


@dataclass
class Run:
    """The results of one run on this rank."""

    values: list[Any]
    parameters: dict[str, torch.Tensor]
    graphs: GraphedSchedule | None
    stages: list[Any]
    receive_memory: list[int]


def train(case: Case, place: Place, folder: Path, *, has_graphs: bool) -> Run:
    torch.manual_seed(1)
    stages = make_stages(case, place, case.stage if has_graphs else pipelining.PipelineStage)
    modules = nn.ModuleList(stage.submod for stage in stages)
    named = {
        name[name.index("blocks.") :]: p  # with "base_model.model." before it in an adapted stage
        for name, p in modules.named_parameters()
        if p.requires_grad
    }
    make = maker(case, stages, folder)
    runner: Any = Eager(make)
    if has_graphs:
        runner = GraphedSchedule(
            stages,
            make,
            tuple(sorted(set(case.counts))),
            options=CaptureOptions(**case.options),
        )
    trained = [*named.values()] or [torch.zeros(1)]
    is_plain = case.sharded is None and case.data_parallel == 1
    optimizer = torch.optim.AdamW(trained, lr=0.01, fused=is_plain or None)
    step_optimizer: Callable[[], Any] = optimizer.step
    if has_graphs and is_plain:
        # No norm is as large, but all ranks sum it.
        group, norm = dist.group.WORLD, 1e9
        captured = runner.graphs.capture_optimizer(optimizer, max_norm=norm, group=group)
        step_optimizer = captured.step
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)

    def call(run: Callable[..., Any], seed: int, count: int, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(10 * seed + place.replica)
        x, target = torch.randn(2, ROWS * count, WIDTH, generator=generator)
        if case.has_scale:
            options["scale"] = torch.rand(ROWS * count, 1, generator=generator)
        losses: list[torch.Tensor] = []
        if is_last:
            options |= {"target": target, "losses": losses}
        output = run(*([x] if is_first else []), num_microbatches=count, **options)
        return output, [loss.detach() for loss in losses]

    values: list[Any] = []
    receive_memory: list[int] = []
    torch.manual_seed(100 + place.rank)
    for step, count in enumerate(case.counts):
        optimizer.zero_grad()
        results = call(runner.step, step, count, return_outputs=step % 2 == 0)
        grads = {n: None if p.grad is None else local(p.grad).clone() for n, p in named.items()}
        values.append((*results, grads))
        step_optimizer()
        if has_graphs:
            receive_memory.append(len(runner.receive_memory.buffers))
            if case.options.get("can_sleep"):
                runner.sleep()
                assert runner.is_asleep is (step > 0)
                runner.wake()
        if step in (1, 3):
            modules.eval()
            with torch.no_grad():
                if case.schedule not in V_SHAPED:
                    values.append(call(runner.eval, 50 + step, case.counts[0]))
                if case.lora:
                    values.append(evaluate_merged(modules))
            modules.train()
    parameters = {name: local(p.detach()).clone() for name, p in named.items()}
    return Run(values, parameters, runner if has_graphs else None, stages, receive_memory)


def num_receive_buffers(stages: list[Any]) -> int:
    """Return the number of buffers that hold memory between steps."""
    infos = [
        info
        for stage in stages
        for of_microbatch in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        for info in of_microbatch
    ]
    buffers = [getattr(info, "buffer", None) for info in infos]
    return sum(buffer is not None and not buffer.is_meta for buffer in buffers)


class Eager:
    """Torch alone, with a new schedule for every step."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def step(self, *args: Any, num_microbatches: int, **kwargs: Any) -> Any:
        return self._make(num_microbatches).step(*args, **kwargs)

    def eval(self, *args: Any, num_microbatches: int, **kwargs: Any) -> Any:
        return self._make(num_microbatches).eval(*args, **kwargs)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def compare(case: Case, place: Place, folder: Path) -> dict[str, Any]:
    eager = train(case, place, folder, has_graphs=False)
    run = train(case, place, folder, has_graphs=True)
    graphs = run.graphs
    slots = graphs.slots
    indices = [stage.stage_index for stage in graphs._stages]
    shared = case.options.get("shared_slots")
    # Frozen stages from the first one on have no backward.
    alone = [i for i in indices if set(case.frozen).issuperset(range(i + 1))]
    return {
        "equal": [same(a, b) for a, b in zip(eager.values, run.values, strict=True)],
        "parameters equal": same(eager.parameters, run.parameters),
        "parameters": run.parameters,
        "losses": [value[1] for value in run.values if len(value) == 3],  # of training
        "counts": case.counts,
        "counters": graphs.graphs.counters,
        "num chunks": len(indices),
        "evaluated": graphs.graphs.forward_only.counters.replays,
        "only training": graphs.graphs.forward_only.why_not,
        "pairs": (
            slots.of_rank[place.rank] * len(indices)
            if shared
            else sum(
                1 if i in alone else min(n, case.options.get("max_slots") or n)
                for i, n in ((i, slots.of_stage[i]) for i in indices)
            )
        ),
        "inputs elsewhere": [getattr(s, "num_elsewhere", 0) for s in run.stages],
        "receive buffers": [num_receive_buffers(r.stages) for r in (eager, run)],
        "receive memory": run.receive_memory,
        "num warmup": case.options.get("num_warmup_steps", 1),
        "num replays": len(indices) * sum(case.counts[case.options.get("num_warmup_steps", 1) :]),
        "num forwards alone": sum(case.counts[1:]) * len(alone),
    }


@contextlib.contextmanager
def place_of(case: Case) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    if case.data_parallel == 1:
        tied = dist.new_group([0])  # as for tied embeddings: not every rank has as many groups
        yield Place(rank, size, 0, None, None)
        if rank == 0:
            dist.destroy_process_group(tied)
        return
    length = size // case.data_parallel
    groups = [
        dist.new_group(list(range(r * length, (r + 1) * length))) for r in range(case.data_parallel)
    ]
    across = [dist.new_group(list(range(i, size, length))) for i in range(length)]
    yield Place(
        rank % length, length, rank // length, groups[rank // length], across[rank % length]
    )


def run_rank(rank: int, size: int, folder: Path) -> None:
    die_with_parent()
    store = dist.FileStore(str(folder / f"store{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    results: dict[str, Any] = {}
    only = os.environ.get("CASES")
    for case in CASES[size]:
        if only and case.name not in only.split(","):
            continue
        try:
            with place_of(case) as place:
                results[case.name] = compare(case, place, folder)
        except BaseException:
            (folder / f"error{size}.{rank}.txt").write_text(
                f"{case.name}\n{traceback.format_exc()}"
            )
            raise
    torch.save(results, folder / f"{size}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, sizes: list[int]) -> int:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # A rank's first backward would import it, and each capture would inspect its objects.
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    for size in sizes:
        ranks = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                run_rank(rank, size, folder)
                return 0
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(Path(sys.argv[1]), list(map(int, sys.argv[2:]))))

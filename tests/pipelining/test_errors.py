"""Failed captures and replays raise one error with the cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch_release import ShapeError
from toys import Apply

from chunkgraph import CaptureOptions
from chunkgraph.errors import CaptureError, ConfigError, ReplayMismatchError, SlotError
from chunkgraph.pipelining import GraphedSchedule, GraphedStage
from chunkgraph.pipelining import stage as stage_module

CPU = torch.device("cpu")
Make = Callable[..., Any]
KEEPS_STORAGE = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_keep_unsharded_storage"), reason="needs torch 2.15"
)


def test_more_slots_than_planned_are_refused(one_rank: None) -> None:
    stage = GraphedStage(nn.Linear(4, 4), 0, 1, CPU)
    schedules = GraphedSchedule(
        stage, lambda n: ScheduleGPipe(stage, n, loss_fn=nn.functional.mse_loss), (2, 4)
    )
    with pytest.raises(ConfigError, match=r"6 microbatches need more .* declared 2 or 4"):
        schedules.step(torch.ones(12, 4), target=torch.ones(12, 4), num_microbatches=6)
    x = torch.ones(6, 4)
    for _ in range(2):  # fewer than the declared ones fit
        schedules.step(x, target=x, num_microbatches=3)
    assert schedules.graphs.counters.replays == 3


def test_a_stage_without_a_graphed_schedule_warns_that_it_trains_eagerly(one_rank: None) -> None:
    stage_module._warn_of_no_schedule.cache_clear()
    stage = GraphedStage(nn.Linear(4, 4), 0, 1, CPU)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 4)
    with pytest.warns(UserWarning, match="trains eagerly.*no GraphedSchedule"):
        schedule.step(x, target=x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(x, target=x)


@pytest.mark.parametrize("cls", [Schedule1F1B, ScheduleInterleaved1F1B])
def test_a_schedule_of_other_stages_is_refused(one_rank: None, cls: type) -> None:
    def stages() -> Any:
        return [GraphedStage(nn.Linear(4, 4), i, 2, CPU) for i in range(2)]

    def make(count: int) -> Any:
        other = stages()[0] if cls is Schedule1F1B else stages()
        return cls(other, count, loss_fn=nn.functional.mse_loss)

    with pytest.raises(ConfigError, match="runs stage 0 as an object that was not passed"):
        GraphedSchedule(stages(), make, (2,))


@pytest.mark.parametrize(
    ("make", "returned"),
    [
        (lambda stage: Schedule1F1B(stage, 4), "a schedule of 4 microbatches"),
        (lambda stage: None, "None"),
        (lambda stage: Schedule1F1B, "<class '.*Schedule1F1B'>"),
    ],
)
def test_a_schedule_of_another_count_is_refused(one_rank: None, make: Make, returned: str) -> None:
    stage = GraphedStage(nn.Linear(4, 4), 0, 1, CPU)
    with pytest.raises(ConfigError, match=rf"make\(8\) returned {returned}\. Let it return"):
        GraphedSchedule(stage, lambda n: make(stage) if n == 8 else Schedule1F1B(stage, n), (4, 8))
    with pytest.raises(ConfigError, match=r"make is <.*Schedule1F1B.*Pass a function that creates"):
        GraphedSchedule(stage, Schedule1F1B(stage, 2), (2,))


def test_another_module_in_a_stage_is_refused(pipeline: Make) -> None:
    one = pipeline(nn.Linear(4, 4))
    one.stages[0].submod = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="stage 0: submod is another module"):
        one.step()


def test_the_count_is_needed_where_there_are_several(pipeline: Make) -> None:
    with pytest.raises(ConfigError, match="may have 2 or 4 microbatches"):
        pipeline(nn.Linear(4, 4)).step(num_microbatches=None)
    pipeline(nn.Linear(4, 4), counts=(2,)).step(num_microbatches=None)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_microbatches_of_another_shape(pipeline: Make, num_stages: int) -> None:
    """The error is that of the graphs, not the one that torch's stage wraps it into.

    On torch 2.11 it is torch's own.
    """
    one = pipeline(*[nn.Linear(4, 4) for _ in range(num_stages)])
    one.step()
    with pytest.raises(ShapeError, match=r"[sS]tage 0") as error:
        one.step(rows=3)
    assert re.search(r"[(\[]3, 4[)\]]", str(error.value))
    if isinstance(error.value, ReplayMismatchError):
        assert "a second GraphedSchedule" in error.value.__notes__[0]
    one.step()


def test_a_stage_that_cannot_be_captured_is_named(pipeline: Make) -> None:
    reads = Apply(lambda m, x: m.layer(x) * x.sum().item(), layer=nn.Linear(4, 4))
    one = pipeline(nn.Linear(4, 4), reads)
    one.step()
    with pytest.raises(CaptureError, match="stage 1"):
        one.step()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def ddp(**options: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(linear(), **options)


def _sharded(module: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)), **options)


def with_dtensor() -> nn.Module:
    module = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh))
    return module


SPLIT: dict[str, Any] = {"cls": ScheduleInterleavedZeroBubble}
OFFLOADED: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
EAGER_STEPS = {n: {"options": CaptureOptions(num_warmup_steps=n)} for n in range(3)}
REFUSED: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, Any], str]] = {
    "split with another hook": (
        lambda: [linear(), linear()],
        {**SPLIT, "dw_builder": lambda: lambda: None},
        "stage 0 has a dw_builder",
    ),
    "split with DDP": (
        lambda: [linear(), ddp()],
        SPLIT,
        "torch never reduces those of a split one",
    ),
    "unused": (lambda: [ddp(find_unused_parameters=True)], {}, "find_unused_parameters"),
    "static": (lambda: [ddp(static_graph=True)], {}, "static_graph"),
    "DDP with an eager step": (lambda: [ddp()], {}, "num_warmup_steps=2"),
    "DTensor": (lambda: [with_dtensor()], {}, "weight is a DTensor"),
}
REFUSED_IF_KEPT: dict[str, tuple[Callable[[], list[nn.Module]], dict[str, Any], str]] = {
    "part of a stage": (
        lambda: [nn.Sequential(_sharded(linear()))],
        {},
        r"stage 0: 0 is sharded .*stage's own module is not",
    ),
    "offloaded": (lambda: [_sharded(linear(), **OFFLOADED)], {}, "Leave offload_policy"),
    "no eager step": (lambda: [_sharded(linear())], EAGER_STEPS[0], "num_warmup_steps=1"),
}


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        *(pytest.param(*case, id=name) for name, case in REFUSED.items()),
        *(pytest.param(*case, id=n, marks=KEEPS_STORAGE) for n, case in REFUSED_IF_KEPT.items()),
    ],
)
def test_stages_that_cannot_have_graphs_are_refused(
    pipeline: Make, modules: Callable[[], list[nn.Module]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        pipeline(*modules(), **options)


def test_steps_outside_of_the_graphed_schedule_are_refused(pipeline: Make) -> None:
    one = pipeline(nn.Linear(4, 4))
    with pytest.raises(RuntimeError) as error:
        one.make(2).step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert isinstance(error.value.__cause__, SlotError)


def test_graphed_schedules_take_turns_on_the_same_stages(pipeline: Make) -> None:
    """One that splits backwards, and one that does not."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    one = pipeline(*modules, cls=ScheduleInterleavedZeroBubble)
    loss_fn = nn.functional.mse_loss
    whole = GraphedSchedule(
        one.stages, lambda n: ScheduleInterleaved1F1B(one.stages, n, loss_fn=loss_fn), (2,)
    )
    both = (one.schedules, whole)
    gradients = []
    for schedules in both * 3:
        one.schedules = schedules
        one.step()
        gradients.append([p.grad for module in modules for p in module.parameters()])
        for module in modules:
            module.zero_grad()
    assert all(all(map(torch.equal, gradients[0], own)) for own in gradients)
    assert [s.graphs.counters.weight_replays > 0 for s in both] == [True, False]
    assert [s.graphs.counters.replays for s in both] == [8, 8]


def test_fsdp_needs_a_release_that_keeps_storage(
    pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, "set_keep_unsharded_storage", raising=False)
    with pytest.raises(ConfigError, match=r"stage 0 is sharded .*Use torch 2\.15"):
        pipeline(_sharded(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"stage 0: 0 is sharded .*Use torch 2\.15"):
        pipeline(nn.Sequential(_sharded(nn.Linear(4, 4))))


@KEEPS_STORAGE
def test_a_parameter_that_fsdp_gathers_as_a_dtensor_is_refused(pipeline: Make) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(4, 4)
    parallelize_module(module, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    one = pipeline(fully_shard(module, mesh=mesh["dp"]))
    one.step()
    with pytest.raises(ConfigError, match="stage 0: weight is a DTensor after"):
        one.step()


def test_a_schedule_without_loss_calls_the_modules(one_rank: None) -> None:
    """It has no backward: nothing is captured, and nothing waits for a backward."""
    module = nn.Linear(4, 4)
    stage = GraphedStage(module, 0, 1, CPU)
    schedules = GraphedSchedule(stage, lambda n: ScheduleGPipe(stage, n), (2,))
    x = torch.randn(4, 4)
    outputs = torch.cat([module(microbatch) for microbatch in x.chunk(2)])
    for _ in range(3):
        assert torch.equal(schedules.step(x), outputs)
    assert schedules.graphs.counters.captures == 0

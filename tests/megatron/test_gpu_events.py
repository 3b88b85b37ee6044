"""Graphs and communication streams wait for each other, even if the other one is late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.megatron.core.data_parallel import DDP_MODULE, ParameterGates, gradient_marker

pytestmark = [pytest.mark.gpu(in_process=True), pytest.mark.megatron]

LATE = 20_000_000  # cycles, some 10 ms: far longer than a launch


class _Group:
    """Stands for a bucket group whose all-gather is slow."""

    def __init__(self, value: float) -> None:
        self.parameter: nn.Parameter
        self.value = value
        self.param_gather_handle: Any = None
        self.param_gather_dispatched = True

    def finish(self) -> None:
        if not self.param_gather_dispatched:
            torch.cuda._sleep(LATE)
            with torch.no_grad():
                self.parameter.fill_(self.value)
            self.param_gather_dispatched = True


class _DDP:
    def __init__(self, module: nn.Module, hook_module: str) -> None:
        self.param_to_bucket_group = {}
        for parameter in module.parameters():
            group = _Group(0.0)
            group.parameter = parameter
            self.param_to_bucket_group[parameter] = group

        def hook(submodule: nn.Module, _args: Any) -> None:
            for parameter in submodule.parameters(recurse=False):
                self.param_to_bucket_group[parameter].finish()

        hook.__module__ = hook_module
        for submodule in module.modules():
            submodule.register_forward_pre_hook(hook)

    def begin_step(self, value: float) -> None:
        for group in self.param_to_bucket_group.values():
            group.value, group.param_gather_dispatched = value, False


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def test_forwards_wait_for_parameters_that_arrive_late() -> None:
    """A replay, and an eager pass of verify, which runs between `gather` and the replay."""
    module = nn.Sequential(_Layer(), _Layer(), _Layer()).cuda()
    ddp = _DDP(module, DDP_MODULE)
    gates = ParameterGates(ddp, module, list(module)[:2])
    x = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with (
        torch.no_grad(),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
        gates.wait_in_capture(),
    ):
        y = module(x)
    for step in (1.0, 2.0, 3.0):
        ddp.begin_step(step)
        gates.gather()
        with torch.no_grad(), gates.wait_in_capture():
            eager = module(x)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 3 * step))
        assert torch.equal(eager, y)


def test_a_reduction_waits_for_a_gradient_that_the_graph_writes_late() -> None:
    from types import SimpleNamespace

    parameter = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    gradient = torch.zeros(1 << 20, device="cuda")
    number = torch.zeros((), device="cuda")
    reduced: list[torch.Tensor] = []

    class Group:
        is_last_microbatch = True

        def register_grad_ready(self, _: nn.Parameter, *_args: object) -> None:
            reduced.append(gradient.clone())

    ddp = SimpleNamespace(
        ddp_config=SimpleNamespace(overlap_grad_reduce=True),
        param_to_bucket_group={parameter: Group()},
        force_all_reduce=False,
    )
    new_marker = gradient_marker(ddp, [parameter])  # type: ignore[arg-type]
    assert new_marker is not None
    marker = new_marker()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        torch.cuda._sleep(LATE)
        gradient.copy_(number.expand_as(gradient))
        marker.accumulated(0)
        torch.cuda._sleep(LATE)
        late = number * 2
    for step in (1.0, 2.0, 3.0):
        number.fill_(step)
        graph.replay()
        marker.replayed()
        torch.cuda.synchronize()
        assert torch.equal(reduced[-1], torch.full_like(gradient, step))
        assert late.item() == 2 * step
    assert len(reduced) == 3

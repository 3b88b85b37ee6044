"""Split backwards of modules that delay their weight gradients themselves."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_models import (
    WIDTH,
    Block,
    as_split,
    assert_equal,
    gradients,
    inputs_of,
    run_eagerly,
    run_split,
)
from torch import nn
from toys import add_to_main_grads

from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend, RecorderBackend


class _Later(torch.autograd.Function):
    """Keeps the inputs of the weight gradient."""

    @staticmethod
    def forward(ctx: Any, layer: Delaying, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = x.flatten(0, 1), grad.flatten(0, 1)
        if not ctx.layer.wgrad_store.delay_wgrad_compute():
            gradient = rows[1].t() @ rows[0]
            if hasattr(weight, "main_grad"):
                weight.grad_added_to_main_grad = True
                weight.main_grad.add_(gradient)
            return None, grad @ weight, gradient
        ctx.layer.wgrad_store.context.put(rows)
        dummy = None
        if hasattr(weight, "main_grad"):
            weight.grad_added_to_main_grad = True
            dummy = torch.empty_like(weight)
        return None, grad @ weight, dummy


class _Store:
    def __init__(self) -> None:
        self.context: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        self.is_enabled = True
        # Not a number, which a session would put back.
        self.switched_off: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def delay_wgrad_compute(self) -> bool:
        return self.is_enabled

    def enable_delay_wgrad_compute(self) -> None:
        self.is_enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self.is_enabled = False
        self.switched_off.put(True)


class Delaying(nn.Linear):
    """A linear layer that delays its weight gradient, as Transformer Engine's do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.wgrad_store = _Store()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Later.apply(self, x, self.weight)

    def backward_dw(self) -> None:
        if not self.wgrad_store.delay_wgrad_compute():
            return
        x, grad = self.wgrad_store.context.get_nowait()
        gradient = grad.t() @ x
        if hasattr(self.weight, "main_grad"):
            self.weight.main_grad.add_(gradient)
        else:
            self.weight.grad = gradient  # replaces the sum


class Delayed(nn.Module):
    """Delaying layers among plain ones."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.block, self.second = kind(), Block(), kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.block(self.first(x)).tanh()) + x


class Transposed(nn.Linear):
    """The same layer without delay."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize("verify", ["none", "shadow", "poison"])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("requires_grad", [True, False], ids=["inner", "first"])
def test_modules_that_delay_their_weights_have_the_bits_of_those_that_do_not(
    backend: GraphBackend, verify: str, main_grad: bool, requires_grad: bool
) -> None:
    modules = []
    for kind in (Transposed, Delaying):
        torch.manual_seed(3)
        modules.append(Delayed(kind).to(backend.device))
    for module in modules if main_grad else ():
        add_to_main_grads(module)
    eager, module = modules
    graphs = as_split(module, backend, verify=verify)
    for lag in (0, 2, 1):
        inputs = inputs_of(backend.device, 4, requires_grad=requires_grad)
        torch.manual_seed(lag)
        expected = run_eagerly(eager, inputs)
        torch.manual_seed(lag)
        assert_equal(run_split(graphs, inputs, lag), expected)
        if main_grad:
            sums = [[p.main_grad for p in m.parameters()] for m in modules]  # type: ignore[misc]
            assert_equal(sums[1], sums[0])
        else:
            assert_equal(gradients(module), gradients(eager))
    assert graphs.counters.weight_replays == 8
    # Where no input takes a gradient, the weight graph is the whole backward.
    assert module.first.wgrad_store.switched_off.empty() is requires_grad


def test_a_delaying_module_that_runs_twice_is_refused() -> None:
    backend = RecorderBackend()
    layer = Delaying()
    graphs = as_split(nn.Sequential(layer, layer), backend)
    with pytest.raises(CaptureError, match="more than once in a forward"):
        graphs.capture([inputs_of(backend.device, 1)[0]])

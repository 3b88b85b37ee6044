"""Split backwards of modules that delay their weight gradients themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from delaying import Delays, Product, Store
from split_models import (
    WIDTH,
    Block,
    as_split,
    assert_equal,
    check_step,
    gradients,
    inputs_of,
    run_split,
)
from torch import nn
from toys import add_to_main_grads

from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend, RecorderBackend


class Delaying(Delays, nn.Linear):
    """A linear layer that delays its weight gradient, and adds it to ``main_grad`` if it can."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.wgrad_store = Store(is_enabled=True)

    @property
    def adds_to_main_grad(self) -> bool:
        return hasattr(self.weight, "main_grad")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(self, x, self.weight)


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
        check_step(graphs, eager, inputs, lag)
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


def test_an_eager_step_leaves_no_weight_gradient_out() -> None:
    layer = Delaying()
    graphs = as_split(nn.Sequential(layer, layer), RecorderBackend())
    with pytest.raises(CaptureError, match="more than once in a forward"):
        run_split(graphs, inputs_of(torch.device("cpu"), 2), lag=1)

"""A graph casts as its capture did, and shares casts of leaves as eager operators do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import Apply, all_equal

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def casting(backend: GraphBackend, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast(backend.device.type, dtype=dtype)


@pytest.fixture
def layers(backend: GraphBackend) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(backend.device)


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, 4, device=backend.device, requires_grad=True)


def test_another_autocast_than_in_the_capture_is_refused(
    layers: nn.Module, backend: GraphBackend
) -> None:
    graphs = ChunkGraphs([layers], [1], backend=backend)
    with casting(backend):
        graphs.capture([new_input(backend)])
    with pytest.raises(ReplayMismatchError, match="captured with autocast"), graphs.step(1):
        graphs.callables[0](new_input(backend))


class Shares(nn.Module):
    """A weight and an input that two operators read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.one(x).tanh()) + self.two(x)


def trained(
    backend: GraphBackend,
    make_call: Callable[[nn.Module], Callable[..., Any]],
    *,
    step: Callable[[], Any] = nullcontext,
    block: str = "call",
    settings: dict[str, Any] | None,
    is_leaf: bool = True,
    new_module: Callable[[], nn.Module] = Shares,
) -> list[torch.Tensor]:
    """Return outputs and gradients of three steps of two microbatches, under autocast blocks."""
    module = new_module().to(backend.device)
    call = make_call(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    tensors: list[torch.Tensor] = []

    def cast(extent: str) -> Any:
        if extent != block or settings is None:
            return nullcontext()
        return torch.autocast(backend.device.type, **settings)

    torch.manual_seed(1)
    for _ in range(3):
        with cast("step"), step():
            leaves = [torch.randn(9, 16, device=backend.device).requires_grad_() for _ in range(2)]
            inputs = leaves if is_leaf else [leaf * 1 for leaf in leaves]
            results = []
            for x in inputs:
                with cast("call"):
                    results.append(call(x))
            for result in results:
                result.float().square().mean().backward()
        tensors += [result.detach().clone() for result in results]
        grads = [t.grad for t in (*leaves, *module.parameters())]
        tensors += [grad.clone() for grad in grads if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return tensors


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("block", ["call", "step"])
def test_casts_of_leaves_are_shared_as_in_eager_training(
    backend: GraphBackend, block: str, cache: bool, is_leaf: bool
) -> None:
    """Gradients of a shared cast are added up in the lower precision."""
    settings = {"dtype": torch.bfloat16, "cache_enabled": cache}
    assert_as_in_eager(backend, block=block, settings=settings, is_leaf=is_leaf)


def assert_as_in_eager(backend: GraphBackend, verify: Any = "none", **how: Any) -> None:
    """Compare what `trained` returns with graphs and without."""
    engines: list[ChunkGraphs] = []

    def capture(module: nn.Module) -> Callable[..., Any]:
        options = CaptureOptions(verify=verify)
        engines.append(ChunkGraphs(module, 2, backend=backend, options=options))
        return engines[0].callables[0]

    expected = trained(backend, lambda module: module, **how)
    actual = trained(backend, capture, step=lambda: engines[0].step(2), **how)
    assert engines[0].counters.replays == 4
    assert all_equal(actual, expected)


def test_a_capture_leaves_no_cast_to_its_caller(backend: GraphBackend) -> None:
    """Such a cast would lie in the graphs' memory and hold outdated parameters."""
    module = Shares().to(backend.device)
    graphs = ChunkGraphs(module, 1, backend=backend)
    x = torch.randn(3, 16, device=backend.device)
    with casting(backend):
        graphs.capture([x])
        module.one.weight.data.mul_(2)
        output = module(x)
    with casting(backend):
        assert torch.equal(output, module(x))


def two_blocks(module: Shares, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        y = module.one(x * 1)
    with torch.autocast(x.device.type, torch.bfloat16):
        return module.one(y.tanh())


def recomputed(module: Shares, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(two_blocks, module, x, use_reentrant=False)


@pytest.mark.parametrize("verify", ["none", "shadow"])
@pytest.mark.parametrize("settings", [None, {"dtype": torch.bfloat16}])
@pytest.mark.parametrize("function", [two_blocks, recomputed])
def test_a_forward_may_enter_autocast_itself(
    backend: GraphBackend, function: Any, settings: Any, verify: Any
) -> None:
    def new_module() -> nn.Module:
        return Apply(lambda m, x: function(m.shares, x), shares=Shares())

    assert_as_in_eager(backend, verify, settings=settings, new_module=new_module)


def test_another_autocast_of_the_backward_is_refused(
    layers: nn.Module, backend: GraphBackend
) -> None:
    graphs = ChunkGraphs([layers], [1], backend=backend)

    def train(around: Any) -> None:
        with graphs.step(1):
            loss = graphs.callables[0](new_input(backend)).sum()
            with around:
                loss.backward()

    for _ in range(2):
        train(nullcontext())
    with pytest.raises(ReplayMismatchError, match="backward was captured with"):
        train(casting(backend))

"""A graph casts as its capture did, and shares casts of leaves as eager operators do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend, RecorderBackend


def casting(backend: GraphBackend, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast(backend.device.type, dtype=dtype)


@pytest.fixture
def layers(backend: GraphBackend) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(backend.device)


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, 4, device=backend.device, requires_grad=True)


@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_steps_are_captured_as_they_are_cast(
    layers: nn.Module, backend: GraphBackend, verify: Any
) -> None:
    """Captures run outside of the caller's autocast. Several slots, and weights that change."""
    graphs = ChunkGraphs([layers], [2], backend=backend, options=CaptureOptions(verify=verify))
    with graphs.step(1):
        with casting(backend):
            y = graphs.callables[0](new_input(backend))
        y.float().sum().backward()
    for _ in range(3):
        with torch.no_grad():
            for p in layers.parameters():
                p.add_(0.1)
        x = new_input(backend)
        with graphs.step(2):
            with casting(backend):
                first, second = graphs.callables[0](x), graphs.callables[0](x)
                expected = layers(x)
            assert second.dtype == expected.dtype == torch.bfloat16
            assert torch.equal(first, expected)
            assert torch.equal(second, expected)
            second.float().sum().backward()
            first.float().sum().backward()
    assert graphs.counters.replays == 6


@pytest.mark.parametrize("captured", [True, False])
def test_another_autocast_than_in_the_capture_is_refused(
    layers: nn.Module, backend: GraphBackend, captured: bool
) -> None:
    graphs = ChunkGraphs([layers], [1], backend=backend)
    with casting(backend) if captured else nullcontext():
        graphs.capture([new_input(backend)])
    other = nullcontext() if captured else casting(backend)
    with pytest.raises(ReplayMismatchError, match="captured with autocast"), graphs.step(1), other:
        graphs.callables[0](new_input(backend))


class CastsInBackward(torch.autograd.Function):
    """A product whose backward enters a block that inherits the dtype around it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with torch.autocast(grad.device.type):
            return (grad @ weight.T).float(), (x.T @ grad).float()


class Product(nn.Module):
    def __init__(self, casts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.casts = casts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return CastsInBackward.apply(x, self.weight) if self.casts else x @ self.weight


@pytest.mark.parametrize("casts", [True, False])
def test_a_dtype_of_blocks_matters_to_a_backward_that_enters_one(casts: bool) -> None:
    """On a CPU: autograd's threads for a GPU have a dtype of their own."""
    backend = RecorderBackend()
    module = Product(casts)
    eager, graphs = copy.deepcopy(module), ChunkGraphs(module, 1, backend=backend)
    device_type = backend.device.type
    captured = torch.get_autocast_dtype(device_type)
    other = torch.bfloat16 if captured is torch.float16 else torch.float16

    def step(dtype: torch.dtype, block: Any) -> None:
        x, grads = new_input(backend), []
        for call, around in ((graphs.callables[0], graphs.step(1)), (eager, nullcontext())):
            leaf = x.detach().requires_grad_()
            with around:
                loss = call(leaf).sum()
                torch.set_autocast_dtype(device_type, dtype)
                with block():
                    loss.backward()
            grads.append(leaf.grad)
        assert torch.equal(*grads)

    def refused() -> Any:
        return pytest.raises(ReplayMismatchError, match="backward was captured with autocast off")

    try:
        for _ in range(3):
            step(captured, nullcontext)
        with refused():
            step(captured, lambda: casting(backend))
        torch.set_autocast_dtype(device_type, captured)
        with refused() if casts else nullcontext():
            step(other, nullcontext)
    finally:
        torch.set_autocast_dtype(device_type, captured)
    assert graphs.counters.replays == 4


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
            with cast("calls"):
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
@pytest.mark.parametrize("block", ["call", "calls", "step"])
def test_casts_of_leaves_are_shared_as_in_eager_training(
    backend: GraphBackend, block: str, cache: bool, is_leaf: bool
) -> None:
    """Gradients of a shared cast are added up in the lower precision."""
    engines: list[ChunkGraphs] = []

    def capture(module: nn.Module) -> Callable[..., Any]:
        engines.append(ChunkGraphs(module, 2, backend=backend))
        return engines[0].callables[0]

    settings = {"dtype": torch.bfloat16, "cache_enabled": cache}
    how: dict[str, Any] = {"block": block, "settings": settings, "is_leaf": is_leaf}
    expected = trained(backend, lambda module: module, **how)
    actual = trained(backend, capture, step=lambda: engines[0].step(2), **how)
    assert engines[0].counters.replays == 4
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_another_sharing_of_casts_than_in_the_capture_is_refused(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(Shares().to(backend.device), 1, backend=backend)
    x = torch.randn(3, 16, device=backend.device, requires_grad=True)
    with casting(backend):
        graphs.capture([x])
        with pytest.raises(ReplayMismatchError, match="a leaf of autograd when"), graphs.step(1):
            graphs.callables[0](x * 1)
        cast = torch.autocast(backend.device.type, dtype=torch.bfloat16, cache_enabled=False)
        with pytest.raises(ReplayMismatchError, match="no cache"), graphs.step(1), cast:
            graphs.callables[0](x)


@pytest.mark.parametrize("at_capture", [True, False])
def test_a_block_that_goes_on_after_an_optimizer_is_refused(
    backend: GraphBackend, at_capture: bool
) -> None:
    """In such a block eager operators read casts of the old parameters."""
    module = Shares().to(backend.device)
    graphs = ChunkGraphs(module, 1, backend=backend)
    others = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(3, 16, device=backend.device)

    def train() -> None:
        with graphs.step(1):
            graphs.callables[0](x).float().sum().backward()

    for _ in range(1 if at_capture else 2):
        with casting(backend):
            train()
    with casting(backend):
        others.step()
        module(x)
        optimizer.step()
        with pytest.raises(ReplayMismatchError, match="optimizer has stepped inside"):
            train()
    graphs.release()
    for _ in range(2):
        with casting(backend):
            train()
    assert graphs.counters.replays == (1 if at_capture else 2)


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


class Decays(nn.Module):
    """Updates one of its parameters in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.layer.weight.data.mul_(0.9)
        return self.other(y)


@pytest.mark.parametrize("num_warmup_passes", [0, 1])
def test_a_forward_that_updates_what_autocast_keeps_casts_of_is_refused(
    backend: GraphBackend, num_warmup_passes: int
) -> None:
    module = Decays().to(backend.device)
    before = module.layer.weight.detach().clone()
    options = CaptureOptions(num_warmup_passes=num_warmup_passes)
    graphs = ChunkGraphs(module, 1, backend=backend, options=options)
    line = Decays.forward.__code__.co_firstlineno + 2
    refused = (
        rf"layer\.weight in place while autocast.*\n  at {__file__}:{line}.*[^$]*cache_enabled"
    )
    with casting(backend), pytest.raises(CaptureError, match=refused):
        graphs.capture([new_input(backend)])
    assert torch.equal(module.layer.weight, before)


def test_a_forward_may_update_parameters_of_which_no_casts_are_kept(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    module = Decays().to(backend.device)
    eager = copy.deepcopy(module)
    graphs = ChunkGraphs(module, 1, backend=backend)
    x = new_input(backend)
    with torch.autocast(backend.device.type, torch.bfloat16, cache_enabled=False):
        graphs.capture([x])
        for _ in range(2):
            with graphs.step(1):
                output = graphs.callables[0](x)
                output.float().sum().backward()
            assert torch.equal(output, eager(x))
    assert graphs.counters.replays == 2


def weight_read_twice(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type, torch.bfloat16):
        return module.one(module.one(x * 1).tanh())


def weight_read_in_two_blocks(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type, torch.bfloat16):
        y = module.one(x * 1)
    with torch.autocast(device_type, torch.bfloat16):
        return module.one(y.tanh())


def weight_read_in_nested_blocks(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type, enabled=False):
        return weight_read_in_two_blocks(module, x, device_type)


def weight_read_without_cache(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type, torch.bfloat16, cache_enabled=False):
        return module.one(module.one(x * 1).tanh())


def weight_read_in_checkpoint(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    return checkpoint(weight_read_twice, module, x, device_type, use_reentrant=False)


def weight_read_in_reentrant_checkpoint(
    module: Shares, x: torch.Tensor, device_type: str
) -> torch.Tensor:
    return checkpoint(weight_read_in_two_blocks, module, x, device_type, use_reentrant=True)


def input_read_twice(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type, torch.bfloat16):
        return module.one(x) + module.two(x)


def default_dtype(module: Shares, x: torch.Tensor, device_type: str) -> torch.Tensor:
    with torch.autocast(device_type):
        return module.one(module.one(x).tanh())


Forward = Callable[[Shares, torch.Tensor, str], torch.Tensor]

AROUND: dict[str, dict[str, Any] | None] = {
    "no block": None,
    "disabled": {"enabled": False},
    "disabled, another dtype": {"enabled": False, "dtype": torch.float16},
    "disabled, no cache": {"enabled": False, "cache_enabled": False},
    "enabled": {"dtype": torch.bfloat16},
}


class Casts(Shares):
    """Enters autocast in its forward."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, x.device.type)


@pytest.mark.parametrize(("num_warmup_passes", "verify"), [(0, "none"), (1, "none"), (1, "shadow")])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "function",
    [
        weight_read_twice,
        weight_read_in_two_blocks,
        weight_read_in_nested_blocks,
        weight_read_without_cache,
        weight_read_in_checkpoint,
        weight_read_in_reentrant_checkpoint,
        input_read_twice,
        default_dtype,
    ],
)
def test_blocks_inside_a_forward_share_casts_as_in_eager_training(
    backend: GraphBackend, function: Forward, around: str, num_warmup_passes: int, verify: Any
) -> None:
    """Casts end with the outermost block, also if that is the caller's and casts nothing."""
    engines: list[ChunkGraphs] = []
    options = CaptureOptions(num_warmup_passes=num_warmup_passes, verify=verify)

    def capture(module: nn.Module) -> Callable[..., Any]:
        engines.append(ChunkGraphs(module, 2, backend=backend, options=options))
        return engines[0].callables[0]

    def new_module() -> nn.Module:
        return Casts(function)

    how: dict[str, Any] = {"block": "calls", "settings": AROUND[around], "new_module": new_module}
    expected = trained(backend, lambda module: module, **how)
    actual = trained(backend, capture, step=lambda: engines[0].step(2), **how)
    assert engines[0].counters.replays == 4
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_capture_inside_a_block_for_calls_outside_is_equal(backend: GraphBackend) -> None:
    """The block around the second step, in which the capture runs, is not that of the calls."""
    results: list[list[torch.Tensor]] = []
    for is_captured in (False, True):
        module = Casts(weight_read_in_two_blocks).to(backend.device)
        graphs = ChunkGraphs(module, 1, backend=backend)
        call = graphs.callables[0] if is_captured else module
        torch.manual_seed(1)
        tensors: list[torch.Tensor] = []
        for number in range(3):
            step = graphs.step(1) if is_captured else nullcontext()
            if number == 1:
                with casting(backend):
                    step.__enter__()
            else:
                step.__enter__()
            y = call(torch.randn(9, 16, device=backend.device))
            y.float().square().mean().backward()
            step.__exit__(None, None, None)
            tensors += [y.detach().clone()]
        tensors += [p.grad for p in module.one.parameters() if p.grad is not None]
        results.append(tensors)
        assert graphs.counters.replays == (2 if is_captured else 0)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("captured", [True, False])
def test_a_block_around_the_call_that_the_capture_did_not_have_is_refused(
    backend: GraphBackend, captured: bool
) -> None:
    """Blocks inside the forward share casts in such a block, and else do not."""
    graphs = ChunkGraphs(Casts(weight_read_in_two_blocks).to(backend.device), 1, backend=backend)
    x = torch.randn(3, 16, device=backend.device)
    block = torch.autocast(backend.device.type, enabled=False)
    with block if captured else nullcontext():
        graphs.capture([x])
    other = nullcontext() if captured else block
    with pytest.raises(ReplayMismatchError, match="inside a block"), graphs.step(1), other:
        graphs.callables[0](x)


@pytest.mark.parametrize("captured", [True, False])
def test_a_block_that_is_off_may_be_around_a_forward_without_blocks(
    backend: GraphBackend, captured: bool
) -> None:
    graphs = ChunkGraphs(Shares().to(backend.device), 1, backend=backend)
    x = torch.randn(3, 16, device=backend.device)
    block = torch.autocast(backend.device.type, enabled=False)
    with block if captured else nullcontext():
        graphs.capture([x])
    with graphs.step(1):
        with nullcontext() if captured else block:
            y = graphs.callables[0](x)
        y.sum().backward()
    assert graphs.counters.replays == 1


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_leaf_that_a_block_inside_casts_is_no_result_of_an_operator(
    backend: GraphBackend, is_leaf: bool
) -> None:
    graphs = ChunkGraphs(Casts(input_read_twice).to(backend.device), 1, backend=backend)
    leaf = torch.randn(3, 16, device=backend.device, requires_grad=True)
    inputs = [leaf, leaf * 1]
    graphs.capture([inputs[not is_leaf]])
    with (
        pytest.raises(ReplayMismatchError, match=r"of autograd when|operator when"),
        graphs.step(1),
    ):
        graphs.callables[0](inputs[is_leaf])


def test_an_input_that_no_block_casts_may_be_a_leaf_or_a_result(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(Casts(weight_read_twice).to(backend.device), 1, backend=backend)
    leaf = torch.randn(3, 16, device=backend.device, requires_grad=True)
    graphs.capture([leaf])
    with graphs.step(1):
        graphs.callables[0](leaf * 1).float().sum().backward()
    assert graphs.counters.replays == 1

"""Outputs and gradients that a caller keeps, drops or replaces, compared with eager training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply, capture, rows

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.bits import same_bits
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def two_heads() -> nn.Module:
    parts = {name: nn.Linear(8, 8) for name in ("trunk", "a", "b")}
    return Apply(lambda m, x: (m.a(h := m.trunk(x)), m.b(h)), **parts)


@pytest.fixture
def both(backend: GraphBackend) -> Callable[..., Any]:
    """Train eagerly and with graphs; compare what the body returns, and gradients."""

    def run(
        module: nn.Module,
        body: Callable[[Any, Callable[..., Any]], list[Any]],
        *,
        num_steps: int = 2,
        count: int = 1,
        begin: Callable[[], object] = lambda: None,
    ) -> Any:
        results: list[list[Any]] = []
        for is_eager in (True, False):
            of_run = copy.deepcopy(module).to(backend.device)
            torch.manual_seed(5)
            begin()
            graphs = ChunkGraphs([of_run], [1], backend=backend)
            call = of_run if is_eager else graphs.callables[0]
            results.append([])
            for _ in range(num_steps):
                with nullcontext() if is_eager else graphs.step(count):
                    for _ in range(count):
                        results[-1] += body(of_run, call)
            results[-1] += [p.grad for p in of_run.parameters()]
        assert graphs.counters.replays
        for expected, value in zip(*results, strict=True):
            if isinstance(expected, torch.Tensor):
                assert isinstance(value, torch.Tensor)
                assert same_bits(value, expected)
            else:
                assert value is expected
        return of_run

    return run


def test_outputs_keep_their_strides(both: Callable[..., None]) -> None:
    def sliced(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = module.layer(x)
        return y.t(), y[:, 2:5], y.sum().expand(3, 2)

    def body(module: nn.Module, call: Callable[..., Any]) -> list[Any]:
        outputs = call(rows(module))
        sum(y.square().sum() for y in outputs).backward()
        return [*outputs, *[torch.tensor(y.stride()) for y in outputs]]

    both(Apply(sliced, layer=nn.Linear(8, 8)), body)


class Memory:
    """Makes tensors of other values each time, in memory of any kind."""

    def __init__(self) -> None:
        self.num_made, self.buffers = 0, {}

    def of(self, kind: str, values: torch.Tensor) -> torch.Tensor:
        self.num_made += 1
        values = values.view(4, 8) * (1.0 + 0.3 * self.num_made)
        match kind:
            case "negated":
                return torch._neg_view(values)
            case "conjugated":
                return torch.complex(values, values.cos()).conj()
            case "expanded":
                return values[0, 3].expand(4, 8)
            case "offset":
                return torch.cat([values, values])[3:7]
            case "same memory":
                return self.buffers.setdefault(values.device, values.clone()).copy_(values)
        return values


@pytest.mark.parametrize("kind", ["new", "same memory", "negated", "expanded", "offset"])
def test_output_gradients_come_from_any_memory(both: Callable[..., None], kind: str) -> None:
    """Copies of graphs read memory: a lazy negation there has other values than the tensor."""

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
            return y.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return memory.of(kind, torch.arange(32.0, device=grad.device))

    def body(module: nn.Module, call: Callable[..., Any]) -> list[Any]:
        Gradient.apply(call(rows(module))).backward()
        return []

    memory = Memory()
    both(nn.Linear(8, 8), body, num_steps=3, count=3, begin=memory.__init__)


@pytest.mark.parametrize("kind", ["new", "same memory", "negated", "conjugated", "offset"])
def test_inputs_come_from_any_memory(both: Callable[..., None], kind: str) -> None:
    def body(module: Any, call: Callable[..., Any]) -> list[Any]:
        output = call(memory.of(kind, torch.arange(32.0, device=module.weight.device).sin()))
        output.abs().sum().backward()
        return [output]

    memory = Memory()
    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    both(nn.Linear(8, 8, dtype=dtype), body, num_steps=3, count=3, begin=memory.__init__)


def test_one_output_that_is_returned_twice_is_one_tensor(both: Callable[..., None]) -> None:
    def body(module: nn.Module, call: Callable[..., Any]) -> list[Any]:
        module.zero_grad()
        y = call(rows(module))
        assert y["a"] is y["b"]
        (y["a"].exp() * y["b"].sin()).sum().backward()
        return []

    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    both(Apply(lambda m, x: dict.fromkeys("ab", m.layer(x)), layer=layer), body)


def test_another_use_of_the_outputs_than_captured_is_refused(backend: GraphBackend) -> None:
    module = two_heads().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with graphs.step(1):
        a, b = graphs.callables[0](rows(module))
        (a.sum() + b.sum()).backward()
    with pytest.raises(ReplayMismatchError, match=r"captured with gradients of \[0, 1\]"):  # noqa: SIM117
        with graphs.step(1):
            graphs.callables[0](rows(module))[0].sum().backward()


def test_gradients_may_get_other_memory_between_steps(both: Callable[..., None]) -> None:
    def body(module: nn.Module, call: Callable[..., Any]) -> list[Any]:
        call(rows(module)).square().mean().backward()
        for p in module.parameters():
            p.grad.data = p.grad.data * 0.5
        return []

    both(nn.Linear(8, 8), body, num_steps=3)


@pytest.mark.parametrize("asks", ["grad", "grad of a parameter", "inputs"])
def test_a_backward_for_some_gradients_alone_is_refused(backend: GraphBackend, asks: str) -> None:
    module = nn.Linear(8, 8).to(backend.device)
    x = rows(module, requires_grad=True)
    graphs = capture(module, x, backend=backend)
    inputs = [x, module.weight] if "parameter" in asks else [x]

    def ask() -> None:
        with graphs.step(1):
            loss = graphs.callables[0](x).sum()
            if asks == "inputs":
                loss.backward(inputs=inputs)
            torch.autograd.grad(loss, inputs, allow_unused=True)

    with pytest.raises(ReplayMismatchError, match="only some gradients"):
        ask()
    assert module.weight.grad is None


def test_without_parameters_autograd_grad_is_as_ever(both: Callable[..., None]) -> None:
    def body(module: Any, call: Callable[..., Any]) -> list[Any]:
        x = torch.randn(4, 8, requires_grad=True, device=module.scale.device)
        return list(torch.autograd.grad(call(x).square().sum(), x))

    scale = nn.Parameter(torch.randn(8), requires_grad=False)
    both(Apply(lambda m, x: (x * m.scale).tanh(), scale=scale), body)


def test_an_argument_that_the_chunk_changes_is_refused(backend: GraphBackend) -> None:
    def add(module: Any, x: torch.Tensor, *, total: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = module.layer(x)
        total.add_(y.detach().sum())
        return y

    module = Apply(add, layer=nn.Linear(8, 8)).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with pytest.raises(CaptureError, match="changes argument 'total' in place"):
        graphs.capture([{"x": rows(module), "total": torch.zeros((), device=backend.device)}])

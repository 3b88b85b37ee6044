"""Outputs and gradients that a caller keeps, drops or replaces, compared with eager training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.engine.verify import same_bits
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import GraphBackend

Program = Callable[[nn.Module, Callable[..., Any], Any], list[Any]]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.trunk(x)
        return self.a(h), self.b(h)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.fixture
def both(backend: GraphBackend) -> Callable[..., None]:
    """Run a program eagerly and with graphs; compare the results."""

    def run(module: nn.Module, program: Program, num_slots: int = 1, **options: Any) -> None:
        results = []
        for is_eager in (True, False):
            of_run = copy.deepcopy(module).to(backend.device)
            torch.manual_seed(5)
            graphs = ChunkGraphs(
                [of_run], [num_slots], backend=backend, options=CaptureOptions(**options)
            )
            if is_eager:
                results.append(program(of_run, of_run, _no_step))
            else:
                results.append(program(of_run, graphs.callables[0], graphs.step))
                assert graphs.counters.replays
        for expected, value in zip(*results, strict=True):
            if isinstance(expected, torch.Tensor):
                assert isinstance(value, torch.Tensor)
                assert same_bits(value, expected)
            else:
                assert value is expected

    return run


class _no_step:  # noqa: N801 - stands for a method
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def rows(module: nn.Module, **options: Any) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device, **options)


def test_losses_may_be_kept(both: Callable[..., None]) -> None:
    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        losses = []
        for _ in range(3):
            with step(4):
                for _ in range(4):
                    loss = call(rows(module))
                    loss.backward()
                    losses += [loss.detach(), loss]
        return losses

    both(Loss(), program)


def test_outputs_keep_their_strides(both: Callable[..., None]) -> None:
    class Sliced(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = super().forward(x)
            return y.t(), y[:, 2:5], y.sum().expand(3, 2)

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        values: list[Any] = []
        for _ in range(2):
            with step(1):
                outputs = call(rows(module))
                sum(y.square().sum() for y in outputs).backward()
                values += [*outputs, *[torch.tensor(y.stride()) for y in outputs]]
        return values

    both(Sliced(8, 8), program)


def test_an_output_with_gaps_may_be_changed_in_place(both: Callable[..., None]) -> None:
    class Sliced(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x)[:, 2:5], x.sum()

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        values: list[Any] = []
        for _ in range(2):
            with step(1):
                y, total = call(rows(module))
                y.mul_(2)
                (y.square().sum() + total).backward()
                values.append(y)
        return [*values, *(p.grad for p in module.parameters())]

    both(Sliced(8, 8), program)


@pytest.mark.parametrize("kind", ["new", "same memory", "negated", "expanded", "offset"])
def test_output_gradients_come_from_any_memory(both: Callable[..., None], kind: str) -> None:
    """Copies of graphs read memory: a lazy negation there has other values than the tensor."""
    buffers: dict[torch.device, torch.Tensor] = {}

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, factor: float) -> torch.Tensor:
            ctx.factor = factor
            return y.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            values = torch.arange(32.0, device=grad.device).view(4, 8) * ctx.factor
            if kind == "negated":
                return torch._neg_view(values), None
            if kind == "expanded":
                return values[0, 3].expand(4, 8), None
            if kind == "offset":
                return torch.cat([values, values])[3:7], None
            if kind == "same memory":
                return buffers.setdefault(grad.device, values.clone()).copy_(values), None
            return values, None

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        for s in range(3):
            with step(3):
                for i in range(3):
                    Gradient.apply(call(rows(module)), 1.0 + s + 0.3 * i).backward()
        return [p.grad for p in module.parameters()]

    both(nn.Linear(8, 8), program)


@pytest.mark.parametrize("kind", ["new", "same memory", "negated", "conjugated", "offset"])
def test_inputs_come_from_any_memory(both: Callable[..., None], kind: str) -> None:
    buffers: dict[torch.device, torch.Tensor] = {}

    def argument(device: torch.device, factor: float) -> torch.Tensor:
        values = torch.arange(32.0, device=device).view(4, 8).sin() * factor
        if kind == "negated":
            return torch._neg_view(values)
        if kind == "conjugated":
            return torch.complex(values, values.cos()).conj()
        if kind == "offset":
            return torch.cat([values, values])[3:7]
        if kind == "same memory":
            return buffers.setdefault(device, values.clone()).copy_(values)
        return values

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        device = next(module.parameters()).device
        outputs = []
        for s in range(3):
            with step(3):
                for i in range(3):
                    outputs.append(call(argument(device, 1.0 + s + 0.3 * i)))
                    outputs[-1].abs().sum().backward()
        return [*outputs, *[p.grad for p in module.parameters()]]

    dtype = torch.complex64 if kind == "conjugated" else torch.float32
    both(nn.Linear(8, 8, dtype=dtype), program)


def test_one_output_that_is_returned_twice_is_one_tensor(both: Callable[..., None]) -> None:
    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = super().forward(x).tanh()
            return {"a": y, "b": y}

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        for _ in range(2):
            module.zero_grad()
            with step(1):
                y = call(rows(module))
                assert y["a"] is y["b"]
                (y["a"].exp() * y["b"].sin()).sum().backward()
        return [p.grad for p in module.parameters()]

    both(Twice(8, 8), program)


class ReturnsItself(nn.Module):
    """Returns a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x), self.frozen, self.norm.running_mean


def test_a_returned_buffer_stays_the_buffer(both: Callable[..., None]) -> None:
    """So does a frozen parameter, which can be thawed."""

    def program(module: Any, call: Callable[..., Any], step: Any) -> list[Any]:
        kept = []
        for _ in range(3):
            with step(2):
                for _ in range(2):
                    y, *own = call(torch.randn(4, 8, device=module.frozen.device))
                    kept += own
                    y.square().sum().backward()
        module.frozen.requires_grad_()
        return [*kept, *(tensor.requires_grad for tensor in kept)]

    both(ReturnsItself(), program)


def test_parameters_below_an_unused_output_get_no_gradient(both: Callable[..., None]) -> None:
    def program(module: Any, call: Callable[..., Any], step: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with step(1):
                call(rows(module))[0].square().mean().backward()
            optimizer.step()
        return [module.b.weight.grad, *module.parameters()]

    both(TwoHeads(), program)


def test_another_use_of_the_outputs_than_captured_is_refused(backend: GraphBackend) -> None:
    module = TwoHeads().to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with graphs.step(1):
        a, b = graphs.callables[0](rows(module))
        (a.sum() + b.sum()).backward()
    with pytest.raises(ReplayMismatchError, match=r"captured with gradients of \[0, 1\]"):  # noqa: SIM117
        with graphs.step(1):
            graphs.callables[0](rows(module))[0].sum().backward()


def step_and_clear(module: nn.Module, optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def halve(module: nn.Module, _: Any) -> None:
    for p in module.parameters():
        p.grad = p.grad * 0.5


def clear_one(module: nn.Module, _: Any) -> None:
    next(iter(module.parameters())).grad = None


def keep_and_drop(module: Any, _: Any) -> None:
    module.kept = [*getattr(module, "kept", []), *[p.grad for p in module.parameters()]]
    module.zero_grad(set_to_none=True)


def clear_in_place(module: nn.Module, _: Any) -> None:
    module.zero_grad(set_to_none=False)


def clip(module: nn.Module, _: Any) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def alias(module: nn.Module, _: Any) -> None:
    for p in module.parameters():
        p.grad = p.grad.view_as(p.grad)


@pytest.mark.parametrize(
    "change",
    [step_and_clear, halve, clear_one, keep_and_drop, clear_in_place, clip, alias],
)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_what_is_done_to_gradients_between_backwards_counts(
    both: Callable[..., None], change: Callable[..., None], num_microbatches: int
) -> None:
    def program(module: Any, call: Callable[..., Any], step: Any) -> list[Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            with step(num_microbatches):
                for _ in range(num_microbatches):
                    call(rows(module)).square().mean().backward()
                    change(module, optimizer)
        kept = getattr(module, "kept", [])
        return [*module.parameters(), *[p.grad for p in module.parameters()], *kept]

    both(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), program)


def test_gradients_that_are_views_of_one_buffer_stay_there(both: Callable[..., None]) -> None:
    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        parameters = list(module.parameters())
        flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        for p, g in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = g.view_as(p)
        flats = []
        for _ in range(3):
            flat.zero_()
            with step(2):
                for _ in range(2):
                    call(rows(module)).square().mean().backward()
            flats.append(flat.clone())
        return flats

    both(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), program)


def test_gradients_kept_by_reference_keep_their_values(both: Callable[..., None]) -> None:
    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        kept = []
        for _ in range(4):
            module.zero_grad(set_to_none=True)
            with step(1):
                call(rows(module)).square().sum().backward()
            kept += [p.grad for p in module.parameters()]
        return kept

    both(nn.Linear(8, 8), program)


def test_views_of_a_dropped_gradient_are_refused(backend: GraphBackend) -> None:
    module = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    with graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()
    view = module.weight.grad.view(-1)
    module.zero_grad()
    with pytest.raises(ReplayMismatchError, match="views of its memory"), graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()
    assert view.numel() == 64


@pytest.mark.parametrize("asks", ["grad", "grad of a parameter", "inputs"])
def test_a_backward_for_some_gradients_alone_is_refused(backend: GraphBackend, asks: str) -> None:
    module = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    x = rows(module, requires_grad=True)
    graphs.capture([x])
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
    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        x = torch.randn(4, 8, requires_grad=True, device=module.scale.device)
        values: list[Any] = []
        for _ in range(2):
            with step(1):
                values += torch.autograd.grad(call(x).square().sum(), x)
        return values

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).tanh()

    both(Scale(), program)


def test_an_argument_that_the_chunk_changes_is_refused(backend: GraphBackend) -> None:
    class Adds(nn.Linear):
        def forward(self, x: torch.Tensor, *, total: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            total.add_(y.detach().sum())
            return y

    module = Adds(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    with pytest.raises(CaptureError, match="changes argument 'total' in place"):
        graphs.capture([{"x": rows(module), "total": torch.zeros((), device=backend.device)}])


def test_received_memory_may_be_another_argument(both: Callable[..., None]) -> None:
    class Delay(nn.Linear):
        def forward(self, x: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return super().forward(x) + last, x, last

    def program(module: nn.Module, call: Callable[..., Any], step: Any) -> list[Any]:
        last, values = torch.zeros(4, 8, device=next(module.parameters()).device), []
        for _ in range(4):
            with step(1):
                y, last, before = call(rows(module), last)
                y.square().sum().backward()
                values += [y, last, before]
        return values

    both(Delay(8, 8), program)


def test_two_tensors_of_one_call_are_received_into_one_slot(backend: GraphBackend) -> None:
    class Add(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + y

    module = Add(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    a, b = rows(module), rows(module)
    graphs.capture([(a, b)])
    with graphs.step(1):
        x, y = graphs.reserve_input(0, 0), graphs.reserve_input(0, 1)
        assert x is not None
        assert y is not None
        x.copy_(a)
        y.copy_(b)
        out = graphs.callables[0](x, y)
        assert torch.equal(out, module(a, b))
        out.sum().backward()

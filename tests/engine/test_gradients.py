"""Gradients without `main_grad` go into the ``grad`` that the caller has at the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply, all_equal, capture, rows, train

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.bits import same_bits
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend, RecorderBackend


def product(weight: nn.Parameter) -> nn.Module:
    return Apply(lambda m, x: torch.tanh(x @ m.weight), weight=weight)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_a_parameter_that_a_function_gives_no_gradient_has_none(backend: GraphBackend) -> None:
    module = Apply(
        lambda m, x: _WithoutGradient.apply(m.linear(x), m.scale),
        linear=nn.Linear(4, 4),
        scale=nn.Parameter(torch.ones(4)),
    ).to(backend.device)
    eager = copy.deepcopy(module)
    x = torch.randn(2, 4, device=backend.device, requires_grad=True)
    train(capture(module, x, backend=backend), x)
    eager(x).sum().backward()
    assert module.scale.grad is eager.scale.grad is None
    assert module.linear.weight.grad is not None
    assert torch.equal(module.linear.weight.grad, eager.linear.weight.grad)


def test_a_wrapper_may_set_main_grad_around_each_backward(backend: GraphBackend) -> None:
    """Megatron-FSDP moves every gradient there after a backward, and removes it after the step."""
    weight = nn.Parameter(torch.randn(4, 4, device=backend.device))
    x = torch.randn(2, 4, device=backend.device)
    expected = copy.deepcopy(weight)
    graphs = capture(product(weight), x, backend=backend)
    total = torch.zeros_like(weight)
    for _ in range(2):
        with graphs.step(3):
            for scale in (1.0, 2.0, 3.0):
                (graphs.callables[0](x) * scale).sum().backward()
                (product(expected)(x) * scale).sum().backward()
                weight.main_grad = weight.grad.clone()
                total += weight.main_grad
                weight.grad = None
        del weight.main_grad
    assert torch.equal(total, expected.grad)


@pytest.mark.parametrize("value", [0.0, 2.0, -0.0, float("nan")])
def test_passes_of_a_session_leave_every_bit_of_main_grads(value: float) -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))]
    for parameter in parameters:
        parameter.main_grad = torch.zeros_like(parameter)
    own = [parameter.main_grad for parameter in parameters]
    own[1].fill_(value)
    before = [grad.clone().reshape(-1).view(torch.int32) for grad in own]
    sinks = GradientSinks(parameters)
    with sinks.cleared():
        assert not any(grad.any() for grad in own)
        for parameter in parameters:
            parameter.main_grad.add_(1)
        sinks.clear()
        assert not any(grad.any() for grad in own)
    after = [grad.reshape(-1).view(torch.int32) for grad in own]
    assert all_equal(after, before)
    assert all(p.main_grad is grad for p, grad in zip(parameters, own, strict=True))


@pytest.mark.parametrize("change", ["moved to other memory", "removed"])
def test_a_main_grad_that_is_not_as_it_was_is_refused(change: str) -> None:
    module = nn.Linear(2, 2)
    module.bias.main_grad = torch.zeros(2)  # type: ignore[assignment]
    graphs = capture(module, torch.ones(1, 2), backend=RecorderBackend())
    if change == "removed":
        del module.bias.main_grad
    else:
        module.bias.main_grad = torch.zeros(2)  # type: ignore[assignment]
    with pytest.raises(ReplayMismatchError, match=rf"bias\.main_grad was {change}"), graphs.step(1):
        pass


def _share(layers: list[nn.Linear]) -> None:
    layers[0].weight.grad = layers[1].weight.grad = torch.zeros_like(layers[1].weight)


def _share_a_bound_one(layers: list[nn.Linear]) -> None:
    layers[0].weight.grad = layers[1].weight.grad


def _make_sparse(layers: list[nn.Linear]) -> None:
    layers[0].weight.grad = torch.eye(8, device=layers[0].weight.device).to_sparse()


def _replace_by_view(layers: list[nn.Linear]) -> None:
    layers[0].weight.grad = layers[0].weight.grad.view_as(layers[0].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_share_a_bound_one, "views of its memory|that of another parameter"),
        (_share, "that of another parameter"),
        (_make_sparse, r"(?s)shape \(8, 8\) is torch.sparse_coo.*to_dense"),
        (_replace_by_view, "views of its memory are still in use"),
    ],
)
def test_gradients_that_cannot_move_to_sinks_are_refused(
    backend: GraphBackend, change: Callable[[list[nn.Linear]], None], message: str
) -> None:
    layers = [nn.Linear(8, 8, bias=False, device=backend.device) for _ in range(2)]
    x = torch.randn(4, 8, device=backend.device)
    graphs = capture(nn.Sequential(*layers), x, backend=backend)
    train(graphs, x)
    change(layers)
    with pytest.raises(ReplayMismatchError, match=message):
        train(graphs, x)


def test_gradients_may_lie_in_a_flat_buffer(backend: GraphBackend) -> None:
    layers = [nn.Linear(8, 8, bias=False, device=backend.device) for _ in range(2)]
    x = torch.randn(4, 8, device=backend.device)
    graphs = capture(nn.Sequential(*layers), x, backend=backend)
    train(graphs, x)
    expected = [2 * layer.weight.grad for layer in layers]
    flat = torch.empty(2, 8, 8, device=backend.device)
    for layer, grad in zip(layers, flat, strict=True):
        layer.weight.grad = grad.copy_(layer.weight.grad)
    train(graphs, x)
    assert torch.equal(flat, torch.stack(expected))
    assert all(layer.weight.grad is not None for layer in layers)
    assert layers[1].weight.grad.data_ptr() == flat[1].data_ptr()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 has it first")
def test_each_gradient_is_rounded_to_a_narrower_dtype(backend: GraphBackend) -> None:
    """Not their sum, which has other bits."""
    grads: list[list[torch.Tensor]] = []
    for uses_graphs in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(8, 8).to(backend.device)
        for parameter in module.parameters():
            parameter.grad_dtype = torch.bfloat16
        inputs = [torch.randn(4, 8, device=backend.device) for _ in range(3)]
        call: Callable[..., torch.Tensor] = module
        if uses_graphs:
            graphs = capture(module, inputs[0], backend=backend, num_slots=3)
            call = graphs.callables[0]
        with graphs.step(3) if uses_graphs else nullcontext():
            for x in inputs:
                call(x).square().sum().backward()
        grads.append([p.grad for p in module.parameters() if p.grad is not None])
    assert grads[0][0].dtype == torch.bfloat16
    assert all_equal(*grads)


# Parameters whose gradients come from several engines or chunks.


def test_two_engines_may_share_a_parameter_in_turn(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).to(backend.device)
    eager = copy.deepcopy(first)
    engines = [ChunkGraphs([m], [1], backend=backend) for m in (first, nn.Sequential(first))]
    for engine in engines:
        engine.capture([rows(first)])
    for clears in (True, True, False, False):
        for engine in engines:
            x = rows(first)
            if clears:
                first.zero_grad()
                eager.zero_grad()
            with engine.step(1):
                engine.callables[0](x).square().sum().backward()
            eager(x).square().sum().backward()
            assert same_bits(first.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("is_one_chunk", [True, False])
def test_one_backward_over_microbatches_that_share_a_parameter_is_refused(
    backend: GraphBackend, is_one_chunk: bool
) -> None:
    first = nn.Linear(8, 8).to(backend.device)
    chunks = [first, first if is_one_chunk else nn.Sequential(first, nn.Tanh())]
    other = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([*chunks, other], [1, 1, 1], backend=backend)
    graphs.capture([rows(first)] * 3)
    with graphs.step(1):
        (graphs.callables[0](rows(first)) + graphs.callables[2](rows(first))).sum().backward()
    with pytest.raises(ReplayMismatchError, match="one backward pass"), graphs.step(1):
        (graphs.callables[0](rows(first)) + graphs.callables[1](rows(first))).sum().backward()

"""Autograd may hold input gradients until after the next backward, which writes to their memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend

Calls = Callable[[torch.Tensor], torch.Tensor]


def gradient_of(loss: torch.Tensor, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("is_leaf", [True, False])
def test_one_tensor_that_two_microbatches_read_gets_both_gradients(
    backend: GraphBackend, is_leaf: bool
) -> None:
    """Autograd adds up both backwards' results before it continues."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(backend.device)
    graphs = ChunkGraphs([layer], [2], backend=backend)
    x = torch.randn(3, 4, device=backend.device, requires_grad=True)
    graphs.capture([x])

    def gradient(call: Calls) -> torch.Tensor:
        shared = x if is_leaf else x * 2.0
        loss = call(shared).sum() + (call(shared) * 3.0).sum()
        return gradient_of(loss, layer, x)

    with graphs.step(2):
        replayed = gradient(graphs.callables[0])
    assert graphs.counters.backward_replays == 2
    assert torch.equal(replayed, gradient(layer))


def test_a_view_that_becomes_an_input_gradient_is_captured(backend: GraphBackend) -> None:
    """A layer on several rows returns a view of their gradient as its input gradient."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(backend.device) for _ in range(2)]
    graphs = ChunkGraphs(layers, [1, 1], backend=backend)
    x = torch.randn(2, 3, 4, device=backend.device, requires_grad=True)

    def gradient(calls: Any) -> torch.Tensor:
        return gradient_of(calls[1](calls[0](x)).square().sum(), nn.ModuleList(layers), x)

    expected = gradient(layers)
    for _ in range(2):
        with graphs.step(1):
            actual = gradient(graphs.callables)
    assert graphs.counters.backward_replays == 2
    assert torch.equal(actual, expected)


def test_one_tensor_that_two_chunks_read_gets_both_gradients(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).to(backend.device) for _ in range(2)]
    graphs = ChunkGraphs(layers, [1, 1], backend=backend)
    x = torch.randn(3, 4, device=backend.device, requires_grad=True)
    graphs.capture([x, x])

    def gradient(calls: Any) -> torch.Tensor:
        return gradient_of(sum(call(x).sum() for call in calls), nn.ModuleList(layers), x)

    with graphs.step(1):
        replayed = gradient(graphs.callables)
    assert torch.equal(replayed, gradient(layers))


def test_a_view_of_received_memory_in_another_layout_is_refused(backend: GraphBackend) -> None:
    """It begins at the address of the slot's input, but has other strides."""
    layer = nn.Linear(4, 4).to(backend.device)
    graphs = ChunkGraphs([layer], [1], backend=backend)
    graphs.capture([torch.randn(4, 4, device=backend.device)])

    def receive_transposed() -> None:
        with graphs.step(1):
            received = graphs.reserve_input(0)
            assert received is not None
            graphs.callables[0](received.t())

    with pytest.raises(ReplayMismatchError, match="strides"):
        receive_transposed()


class Residual(nn.Linear):
    """Reads its input twice; `Once` reads it once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(super().forward(x))


class Once(nn.Linear):
    pass


class Returned(nn.Linear):
    """Reads its input once and returns it."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


def _train_with_another_reader(
    backend: GraphBackend | None, device: Any, last: type[nn.Linear], where: str, hooks: bool
) -> list[torch.Tensor]:
    """Train two chunks in one backward; another operator reads the tensor between them."""
    torch.manual_seed(1)
    chunks = [Residual(8, 8).to(device), last(8, 8).to(device)]
    calls: list[Any] = [*chunks]
    graphs = ChunkGraphs(chunks, [1, 1], backend=backend) if backend is not None else None
    if graphs is not None:
        calls = list(graphs.callables)
    gradients: list[torch.Tensor] = []
    for seed in range(4):
        torch.manual_seed(seed)
        leaf = torch.randn(16, 8, device=device, requires_grad=True)
        with nullcontext() if graphs is None else graphs.step(1):
            other = (leaf.sin() * 3.0).sum() if where == "before leaf" else 0.0
            hidden = calls[0](leaf)
            if hooks:
                hidden.register_hook(lambda gradient: gradient * 2.0)
            if where == "before":
                other = (hidden.sin() * 3.0).sum()
            results = calls[1](hidden)
            if where.startswith("after"):
                other = ((leaf if where == "after leaf" else hidden).sin() * 3.0).sum()
            every = results if isinstance(results, tuple) else (results,)
            (sum(result.square().sum() for result in every) + other).backward()
        assert leaf.grad is not None
        assert not leaf._backward_hooks
        gradients += [leaf.grad, *[p.grad.clone() for p in chunks[0].parameters()]]  # type: ignore[union-attr]
        for chunk in chunks:
            chunk.zero_grad()
    return gradients


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("where", ["nowhere", "before", "after", "before leaf", "after leaf"])
@pytest.mark.parametrize("last", [Residual, Once, Returned])
def test_a_sum_of_input_gradients_is_added_as_eagerly_or_refused(
    backend: GraphBackend, last: type[nn.Linear], where: str, hooks: bool
) -> None:
    arguments = backend.device, last, where, hooks
    eager = _train_with_another_reader(None, *arguments)
    if where == "after leaf" or (where == "after" and last is not Once):
        with pytest.raises(ReplayMismatchError, match="another operator reads its input tensor 0"):
            _train_with_another_reader(backend, *arguments)
    else:
        graphed = _train_with_another_reader(backend, *arguments)
        assert all(map(torch.equal, graphed, eager))


def test_a_sum_of_input_gradients_is_checked_in_its_own_backward(backend: GraphBackend) -> None:
    layer = Residual(8, 8).to(backend.device)
    x = torch.randn(4, 8, device=backend.device, requires_grad=True)
    graphs = ChunkGraphs(layer, 2, backend=backend)
    graphs.capture([x])

    def train(*, reads: bool) -> None:
        with graphs.step(2):
            first, second = (graphs.callables[0](x).sum() for _ in range(2))
            other = x.sin().sum() if reads else 0.0
            first.backward()
            (second + other).backward()

    train(reads=False)
    assert not x._backward_hooks
    with pytest.raises(ReplayMismatchError, match="another operator reads its input tensor 0"):
        train(reads=True)


@pytest.mark.parametrize("shares_inputs", [True, False])
def test_inputs_are_watched_where_others_may_read_them(
    backend: GraphBackend, shares_inputs: bool
) -> None:
    module = Residual(8, 8).to(backend.device)
    chunk = replace(Chunk.from_module(module, "chunk"), shares_inputs=shares_inputs)
    graphs = ChunkGraphs(chunk, 1, backend=backend)
    x = torch.randn(4, 8, device=backend.device, requires_grad=True)
    graphs.capture([x])
    with graphs.step(1):
        y = graphs.callables[0](x)
        assert bool(x._backward_hooks) is shares_inputs
        y.sum().backward()


def test_no_hook_is_left_on_an_empty_input(backend: GraphBackend) -> None:
    layer = Residual(8, 8).to(backend.device)
    x = torch.randn(0, 8, device=backend.device, requires_grad=True)
    graphs = ChunkGraphs(layer, 1, backend=backend)
    graphs.capture([x])
    for _ in range(2):
        with graphs.step(1):
            graphs.callables[0](x).sum().backward()
    assert not x._backward_hooks

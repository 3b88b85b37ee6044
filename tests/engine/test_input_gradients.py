"""Autograd may hold input gradients until after the next backward, which writes to their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend

Calls = Callable[[torch.Tensor], torch.Tensor]


def gradient_of(loss: torch.Tensor, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    x.grad = None
    loss.backward()
    assert x.grad is not None
    return x.grad


def test_a_leaf_that_two_microbatches_read_gets_both_gradients(
    backend: GraphBackend,
) -> None:
    """Its ``.grad`` is what the first backward returned."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).to(backend.device)
    graphs = ChunkGraphs([layer], [2], backend=backend)
    x = torch.randn(3, 4, device=backend.device, requires_grad=True)
    graphs.capture([x])

    def gradient(call: Calls) -> torch.Tensor:
        losses = call(x).sum(), (call(x) * 3.0).sum()
        gradient_of(losses[0], layer, x)
        losses[1].backward()
        assert x.grad is not None
        return x.grad

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
            graphs.callables[0](received.t())

    with pytest.raises(ReplayMismatchError, match="strides"):
        receive_transposed()

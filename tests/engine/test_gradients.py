"""Where gradients without `main_grad` go: whatever the caller has in ``grad`` by the backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.graphs import GraphBackend


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def _two_chunks(backend: GraphBackend) -> tuple[list[nn.Module], torch.Tensor]:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(4, 4, device=backend.device))
    return [Tied(weight), Tied(weight)], torch.randn(2, 4, device=backend.device)


def _step(
    calls: list[Callable[..., torch.Tensor]], x: torch.Tensor, weight: nn.Parameter, *, clears: bool
) -> None:
    if clears:
        weight.grad = None
    for scale in (1.0, 2.0):
        output = calls[0](x * scale)
        received = output.detach().requires_grad_()  # as a pipeline schedule runs two chunks
        calls[1](received).sum().backward()
        output.backward(received.grad)


@pytest.mark.parametrize("clears", [False, True], ids=["kept", "dropped inside the step"])
def test_chunks_that_share_a_parameter_add_to_one_gradient(
    backend: GraphBackend, clears: bool
) -> None:
    chunks, x = _two_chunks(backend)
    twins = copy.deepcopy(chunks)
    weight, expected = chunks[0].weight, twins[0].weight
    graphs = ChunkGraphs(chunks, [1, 1], backend=backend)
    h = torch.zeros(2, 4, device=backend.device, requires_grad=True)
    graphs.capture([(x,), (h,)])
    for _ in range(3):
        with graphs.step(2):
            _step(list(graphs.callables), x, weight, clears=clears)
        _step(list(twins), x, expected, clears=clears)
        assert torch.equal(weight.grad, expected.grad)

"""Outputs and arguments that are changed in place between a forward and its backward."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def rows(module: nn.Module) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device)


def test_an_output_that_the_backward_needs_is_not_changed_in_place(backend: GraphBackend) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    with pytest.raises(ReplayMismatchError, match="changed in place"), graphs.step(1):
        graphs.callables[0](rows(module)).mul_(3).sum().backward()


class ReturnsItsArgument(nn.Linear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        return super().forward(x) * scale.sum(), scale


def test_an_argument_that_is_returned_is_not_changed_in_place(backend: GraphBackend) -> None:
    """Eager training changes the output with it, a replay's copy would not change."""
    module = ReturnsItsArgument(8, 8).to(backend.device)
    scale = torch.ones(2, device=backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([(rows(module), scale)])

    def train(factor: float) -> None:
        with graphs.step(1):
            y, returned = graphs.callables[0](rows(module), scale)
            if factor != 1.0:
                scale.mul_(factor)
            (y * returned.sum()).sum().backward()

    train(1.0)
    scale.mul_(2.0)  # between steps
    train(1.0)
    with pytest.raises(ReplayMismatchError, match="changed in place"):
        train(2.0)


class ReturnsAView(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, y[:, 1:]


@pytest.mark.parametrize("backward", ["whole", "split"])
@pytest.mark.parametrize("changed", [0, 1])
def test_an_output_that_shares_memory_is_not_changed_in_place_in_a_warmup_step(
    backend: GraphBackend, changed: int, backward: Literal["whole", "split"]
) -> None:
    """Each output has its own node there; the gradient through the other one would be wrong."""
    module = ReturnsAView(8, 8).to(backend.device)
    chunk = Chunk.from_module(module, "chunk", backward=backward)
    graphs = ChunkGraphs([chunk], [1], backend=backend)

    def train() -> None:
        outputs = graphs.callables[0](rows(module))
        outputs[changed].mul_(2)
        sum(y.square().sum() for y in outputs).backward()

    with pytest.raises(ReplayMismatchError, match="changed in place"), graphs.step(1):
        train()


def test_an_argument_that_is_returned_is_not_changed_in_place_in_a_warmup_step(
    backend: GraphBackend,
) -> None:
    module = ReturnsItsArgument(8, 8).to(backend.device)
    scale = torch.ones(2, device=backend.device, requires_grad=True) * 2
    graphs = ChunkGraphs([module], [1], backend=backend)

    def train() -> None:
        _, returned = graphs.callables[0](rows(module), scale)
        scale.mul_(3)
        returned.square().sum().backward()

    with pytest.raises(ReplayMismatchError, match="changed in place"), graphs.step(1):
        train()

"""What `verify="poison"` accepts: NaNs that the model itself computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.graphs import GraphBackend


def rows(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(4, 8, device=backend.device, requires_grad=True)


class RandomNaN(torch.autograd.Function):
    """Produces a NaN for half of the random numbers, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, draw: torch.Tensor, in_forward: bool) -> torch.Tensor:
        ctx.factor = torch.where(draw < 0.5, torch.nan, 1.0)
        ctx.in_forward = in_forward
        return x * ctx.factor if in_forward else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.in_forward else grad * ctx.factor, None, None


@pytest.mark.parametrize("in_forward", [True, False])
def test_poison_draws_the_random_numbers_of_the_replay(
    backend: GraphBackend, in_forward: bool
) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            draw = torch.rand((), device=x.device)
            return super().forward(RandomNaN.apply(x, draw, in_forward))

    chunk = Drawing(8, 8).to(backend.device)
    options = CaptureOptions(verify="poison")
    graphs = ChunkGraphs([chunk], [1], backend=backend, options=options)
    graphs.capture([(rows(backend),)])

    def train_often() -> None:
        for seed in range(12):
            torch.manual_seed(seed)
            chunk.zero_grad(set_to_none=False)
            with graphs.step(1):
                graphs.callables[0](rows(backend)).square().sum().backward()

    with pytest.warns(UserWarning, match="NaN"):
        train_often()


def test_poison_accepts_infinite_gradients_that_add_up_to_a_nan(backend: GraphBackend) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    chunk = Shift().to(backend.device)
    options = CaptureOptions(verify="poison")
    graphs = ChunkGraphs([chunk], [1], backend=backend, options=options)
    graphs.capture([(rows(backend),)])
    with graphs.step(2):
        for sign in (1, -1):
            (graphs.callables[0](rows(backend)) * (sign * torch.inf)).sum().backward()
    assert chunk.bias.grad is not None
    assert chunk.bias.grad.isnan().all()

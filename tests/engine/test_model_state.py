"""Callers change a captured module's tensors between captures and steps, as in eager training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_weight import Quantized, QuantizedWeight
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import all_equal, capture, train

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

WIDTH = 8


def rows(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, WIDTH, device=backend.device)


def layers(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)


def test_explicit_parameters_that_are_frozen_get_no_gradient(backend: GraphBackend) -> None:
    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module)
    module[0].requires_grad_(False)
    train(capture(chunk, rows(backend), backend=backend), rows(backend))
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None


def test_explicit_parameters_that_miss_a_thawed_one_are_refused_by_name(
    backend: GraphBackend,
) -> None:
    module = layers(backend.device)
    module[0].bias.requires_grad_(False)
    trained = tuple(p for p in module.parameters() if p.requires_grad)
    graphs = ChunkGraphs([Chunk(module, trained, "stage", module, "body")], [1], backend=backend)
    module[0].bias.requires_grad_()
    with pytest.raises(CaptureError, match=r"stage: .*body\.0\.bias: \(8,\).*Chunk\.parameters"):
        graphs.capture([rows(backend)])


def test_parameters_frozen_after_they_were_promised_are_refused(backend: GraphBackend) -> None:
    class Marker:
        def accumulated(self, index: int) -> None: ...

        def replayed(self) -> None: ...

    module = layers(backend.device)
    chunk = Chunk(module, tuple(module.parameters()), "stage", module, new_marker=Marker)
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    module[0].bias.requires_grad_(False)
    with pytest.raises(CaptureError, match=r"1 parameters \(0\.bias\) were frozen after"):
        graphs.capture([rows(backend)])


def test_a_parameter_without_a_shape_is_refused_by_name(backend: GraphBackend) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LazyLinear(WIDTH))
    with pytest.raises(CaptureError, match=r"1\.weight has no shape yet"):
        capture(module, rows(backend), backend=backend)


class Kept(nn.Module):
    """Uses its own parameter through another reference."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kept = {"w": [(1, (self.weight, 2))]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(h: torch.Tensor) -> torch.Tensor:
            return (h @ self.kept["w"][0][1][0]).tanh()

        return self.linear(checkpoint(inner, x, use_reentrant=True, preserve_rng_state=False))


def test_parameters_in_containers_train(backend: GraphBackend) -> None:
    module = Kept().to(backend.device)
    eager = copy.deepcopy(module)
    x = rows(backend).requires_grad_()
    graphs = capture(module, x, backend=backend)
    for _ in range(2):
        train(graphs, x)
        eager(x).sum().backward()
    assert all_equal(*([p.grad for p in m.parameters()] for m in (module, eager)))
    assert module.kept["w"][0][1][0] is module.weight


# Parameters that have no memory themselves but hold tensors, as FP8 weights do.


def _train(forward: Any, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run microbatches two at a time; return the gradients of the inputs."""
    gradients = []
    for first in range(0, len(xs), 2):
        leaves = [x.clone().requires_grad_() for x in xs[first : first + 2]]
        for leaf, y in [(leaf, forward(leaf)) for leaf in leaves]:
            y.square().sum().backward()
            assert leaf.grad is not None
            gradients.append(leaf.grad)
    return gradients


def _values(model: Quantized) -> list[torch.Tensor]:
    return [
        p.dequantize() if isinstance(p, QuantizedWeight) else p.detach().clone()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("verify", ["none", "poison", "shadow"])
def test_weights_that_are_written_in_place_are_equal_to_eager(
    backend: GraphBackend, verify: Any
) -> None:
    model, eager = (Quantized(backend.device) for _ in range(2))
    options = CaptureOptions(verify=verify, num_warmup_steps=1)
    graphs = ChunkGraphs([model], [2], backend=backend, options=options)
    for num_microbatches in (3, 2, 5, 1):
        xs = [torch.randn(4, model.width, device=backend.device) for _ in range(num_microbatches)]
        with graphs.step(num_microbatches):
            gradients = _train(graphs.callables[0], xs)
        assert all(map(torch.equal, gradients, _train(eager, xs)))
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.update()
        eager.update()
        assert all(map(torch.equal, _values(model), _values(eager)))
    assert graphs.counters.replays == 8

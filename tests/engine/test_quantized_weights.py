"""Parameters that have no memory themselves but hold tensors, as FP8 weights do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_weight import Quantized, QuantizedWeight

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.graphs import GraphBackend


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

"""A graph casts as its capture did, whatever autocast says when it is replayed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def casting(backend: GraphBackend, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast(backend.device.type, dtype=dtype)


@pytest.fixture
def layers(backend: GraphBackend) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(backend.device)


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, 4, device=backend.device, requires_grad=True)


@pytest.mark.parametrize("verify", ["none", "shadow"])
def test_steps_are_captured_as_they_are_cast(
    layers: nn.Module, backend: GraphBackend, verify: Any
) -> None:
    """Captures run outside of the caller's autocast; with several slots, and weights that move."""
    graphs = ChunkGraphs([layers], [2], backend=backend, options=CaptureOptions(verify=verify))
    with graphs.step(1):
        with casting(backend):
            y = graphs.callables[0](new_input(backend))
        y.float().sum().backward()
    for _ in range(3):
        with torch.no_grad():
            for p in layers.parameters():
                p.add_(0.1)
        x = new_input(backend)
        with graphs.step(2):
            with casting(backend):
                first, second = graphs.callables[0](x), graphs.callables[0](x)
                expected = layers(x)
            assert second.dtype == expected.dtype == torch.bfloat16
            assert torch.equal(first, expected)
            assert torch.equal(second, expected)
            second.float().sum().backward()
            first.float().sum().backward()
    assert graphs.counters.replays == 6


@pytest.mark.parametrize("captured", [True, False])
def test_another_autocast_than_in_the_capture_is_refused(
    layers: nn.Module, backend: GraphBackend, captured: bool
) -> None:
    graphs = ChunkGraphs([layers], [1], backend=backend)
    with casting(backend) if captured else nullcontext():
        graphs.capture([new_input(backend)])
    other = nullcontext() if captured else casting(backend)
    with pytest.raises(ReplayMismatchError, match="captured with autocast"), graphs.step(1), other:
        graphs.callables[0](new_input(backend))

"""Chunks without a backward: frozen parts of a model, and evaluation inside a replayed step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.program import FORWARD_ONLY
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend


def model(backend: GraphBackend) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 4))
    return layers.to(backend.device).requires_grad_(False)


def graphs_of(module: nn.Module, backend: GraphBackend, **options: Any) -> ChunkGraphs:
    chunk = Chunk.from_module(module, "frozen", program=FORWARD_ONLY)
    return ChunkGraphs(chunk, 1, backend=backend, options=CaptureOptions(**options))


@pytest.mark.parametrize("verify", ["none", "shadow", "poison"])
@pytest.mark.parametrize("has_grad_mode", [True, False])
def test_one_slot_serves_any_number_of_forwards(
    backend: GraphBackend, verify: str, has_grad_mode: bool
) -> None:
    module = model(backend)
    graphs = graphs_of(module, backend, verify=verify)
    xs = [torch.randn(3, 8, device=backend.device) for _ in range(5)]
    results = []
    for _ in range(3):
        torch.manual_seed(5)
        with graphs.step(len(xs)), torch.set_grad_enabled(has_grad_mode):
            results.append([graphs.callables[0](x) for x in xs])
    torch.manual_seed(5)
    expected = [module(x) for x in xs]
    assert not any(y.requires_grad for ys in results for y in ys)
    for ys in results:
        assert all(map(torch.equal, ys, expected))
    assert (graphs.counters.replays, graphs.counters.backward_replays) == (10, 0)
    assert graphs.report is not None
    assert graphs.report.num_graphs == 1


def test_what_needs_a_gradient_is_refused(backend: GraphBackend) -> None:
    module = model(backend)
    x = torch.randn(3, 8, device=backend.device)
    with pytest.raises(CaptureError, match="an input requires grad"):
        graphs_of(module, backend).capture([x.clone().requires_grad_()])
    module[3].requires_grad_(True)
    with pytest.raises(CaptureError, match=r"without a backward, but 3\.weight requires grad"):
        graphs_of(module, backend).capture([x])


@pytest.mark.parametrize("verify", ["none", "shadow", "poison"])
def test_a_chunk_that_trains_nothing_has_no_backward(backend: GraphBackend, verify: str) -> None:
    """It is found in the sampled call, has one slot, and its results survive later forwards."""
    frozen, trained = model(backend), nn.Linear(4, 4).to(backend.device)
    expected, got = [], []
    x = torch.randn(4, 3, 8, device=backend.device)
    for chunks in ([frozen, trained], None):
        if chunks is not None:
            options = CaptureOptions(verify=verify)
            graphs = ChunkGraphs(chunks, [3, 3], backend=backend, options=options)
        for _ in range(3):
            torch.manual_seed(5)
            trained.zero_grad()
            calls: Any = (frozen, trained) if chunks is None else graphs.callables
            with graphs.step(3, eager=chunks is None):
                hidden = [calls[0](x[i]) for i in range(3)]
                losses = [calls[1](h).square().sum() for h in hidden]
                for loss in losses:
                    loss.backward()
            (expected if chunks is None else got).append(trained.weight.grad.clone())
    assert all(map(torch.equal, got, expected))
    assert graphs.counters.replays == 2 * 6
    assert graphs.report is not None
    assert graphs.report.num_slots == (1, 3)
    assert graphs.report.num_graphs == 1 + 2 * 3

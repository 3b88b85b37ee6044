"""Captured optimizers on a GPU: capturable ones, and a host that does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.graphs import CUDABackend
from chunkgraph.optimizer import CapturedOptimizer

pytestmark = pytest.mark.gpu

NUM_STEPS = 6


def _layer() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()


def _batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        yield torch.randn(8, 64, generator=generator).cuda()


def _train(layer: nn.Module, step: Any) -> None:
    for x in _batches():
        layer.zero_grad(set_to_none=False)
        layer(x).square().mean().backward()
        step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_capturable_optimizers_equal_eager_ones(kind: Any) -> None:
    results = []
    for is_captured in (False, True):
        layer = _layer()
        parameters = list(layer.parameters())
        rate = torch.tensor(1e-2, device="cuda")
        optimizer = kind(parameters, lr=rate, weight_decay=0.1, capturable=True)
        captured = CapturedOptimizer(optimizer, CUDABackend(), max_norm=0.1)

        def step(o: Any = optimizer, p: Any = parameters) -> None:
            nn.utils.clip_grad_norm_(p, 0.1)
            o.step()

        _train(layer, captured.step if is_captured else step)
        assert not is_captured or captured.graph.num_replays >= NUM_STEPS - 2
        results.append([p.detach().clone() for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_host_does_not_wait_for_a_replayed_step() -> None:
    layer = _layer()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    captured = CapturedOptimizer(optimizer, CUDABackend(), max_norm=0.1)
    _train(layer, captured.step)
    before = captured.graph.num_replays
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert captured.graph.num_replays == before + 1

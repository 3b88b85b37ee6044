"""Hooks on captured parameters are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def rows(module: nn.Module) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device)


def test_hooks_added_after_the_capture_are_refused(backend: GraphBackend) -> None:
    module = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(module.weight, method)(lambda *_: None)
        with pytest.raises(ReplayMismatchError, match="hook"), graphs.step(1):
            pass
        handle.remove()
    with graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()

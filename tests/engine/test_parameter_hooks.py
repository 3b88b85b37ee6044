"""Hooks on captured parameters are refused, whoever added them and wherever they are."""

from __future__ import annotations

from collections import OrderedDict

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
    node = torch.autograd.graph.get_gradient_edge(module.bias).node
    for target, method in (
        (module.weight, "register_hook"),
        (module.weight, "register_post_accumulate_grad_hook"),
        (node, "register_hook"),
        (node, "register_prehook"),
    ):
        handle = getattr(target, method)(lambda *_: None)
        with pytest.raises(ReplayMismatchError, match="hook"), graphs.step(1):
            pass
        handle.remove()
    with graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()


@pytest.mark.parametrize("attribute", ["_backward_hooks", "_post_accumulate_grad_hooks"])
def test_hooks_that_torch_did_not_register_are_refused(
    backend: GraphBackend, attribute: str
) -> None:
    """Eager training calls them as well."""
    module = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    with graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()
    setattr(module.weight, attribute, OrderedDict({10**9: lambda *_: None}))
    with pytest.raises(ReplayMismatchError, match="hook waits"), graphs.step(1):
        graphs.callables[0](rows(module)).sum().backward()


def test_hooks_on_any_node_are_seen_after_many_steps(backend: GraphBackend) -> None:
    """Each step checks a few nodes only; a later step reaches every node."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    graphs.capture([rows(module)])
    for _ in range(5):  # every node was checked once
        with graphs.step(1):
            graphs.callables[0](rows(module)).sum().backward()
    for parameter in (module[0].weight, module[5].bias):
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        handle = node.register_prehook(lambda *_: None)

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                with graphs.step(1):
                    graphs.callables[0](rows(module)).sum().backward()

        with pytest.raises(ReplayMismatchError, match="hook waits"):
            train(3)
        with pytest.raises(ReplayMismatchError, match="hook waits"):  # until the hook is removed
            train(1)
        handle.remove()
        train(4)

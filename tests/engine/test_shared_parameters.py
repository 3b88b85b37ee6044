"""Parameters whose gradients come from several engines or chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.bits import same_bits
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def rows(module: nn.Module, **options: Any) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device, **options)


def test_two_engines_may_share_a_parameter_in_turn(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).to(backend.device)
    eager = copy.deepcopy(first)
    engines = [ChunkGraphs([m], [1], backend=backend) for m in (first, nn.Sequential(first))]
    for engine in engines:
        engine.capture([rows(first)])
    for clears in (True, True, False, False):
        for engine in engines:
            x = rows(first)
            if clears:
                first.zero_grad()
                eager.zero_grad()
            with engine.step(1):
                engine.callables[0](x).square().sum().backward()
            eager(x).square().sum().backward()
            assert same_bits(first.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("is_one_chunk", [True, False])
def test_one_backward_over_microbatches_that_share_a_parameter_is_refused(
    backend: GraphBackend, is_one_chunk: bool
) -> None:
    first = nn.Linear(8, 8).to(backend.device)
    chunks = [first, first if is_one_chunk else nn.Sequential(first, nn.Tanh())]
    other = nn.Linear(8, 8).to(backend.device)
    graphs = ChunkGraphs([*chunks, other], [1, 1, 1], backend=backend)
    graphs.capture([rows(first)] * 3)
    with graphs.step(1):
        (graphs.callables[0](rows(first)) + graphs.callables[2](rows(first))).sum().backward()
    with pytest.raises(ReplayMismatchError, match="one backward pass"), graphs.step(1):
        (graphs.callables[0](rows(first)) + graphs.callables[1](rows(first))).sum().backward()

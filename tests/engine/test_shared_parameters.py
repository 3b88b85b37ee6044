"""Parameters whose gradients come from several engines or chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.verify import same_bits
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import GraphBackend


def rows(module: nn.Module, **options: Any) -> torch.Tensor:
    return torch.randn(4, 8, device=next(module.parameters()).device, **options)


def test_two_engines_may_share_a_parameter(backend: GraphBackend) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).to(backend.device)
    second = nn.Sequential(first, nn.Tanh())
    eager = copy.deepcopy([first, second])
    eager[1][0] = eager[0]
    engines = [ChunkGraphs([m], [1], backend=backend) for m in (first, second)]
    for engine in engines:
        engine.capture([rows(first)])
    for _ in range(2):
        batches = [rows(first) for _ in range(4)]
        first.zero_grad()
        eager[0].zero_grad()
        with engines[0].step(2), engines[1].step(2):
            for i, x in enumerate(batches):
                engines[i % 2].callables[0](x).square().sum().backward()
        for i, x in enumerate(batches):
            eager[i % 2](x).square().sum().backward()
        assert same_bits(first.weight.grad, eager[0].weight.grad)


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

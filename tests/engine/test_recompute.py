"""Recomputation of activations runs inside the captured backward, and the slots hold less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import capture

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend

WIDTH, ROWS, DEPTH = 32, 64, 3


class Deep(nn.Module):
    """Layers with several activations each, saved or computed again; one is used twice."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(DEPTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.layers[0]]:
            if self.reentrant is None:
                x = x + layer(x)
            else:
                x = x + checkpoint(layer, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        return x


def _captured(model: nn.Module | Chunk, backend: GraphBackend, **options: Any) -> ChunkGraphs:
    x = torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)
    return capture(model, x, backend=backend, num_slots=2, **options)


def test_a_slot_holds_only_the_inputs_of_what_is_recomputed(backend: GraphBackend) -> None:
    reports = [
        _captured(Deep(reentrant).to(backend.device), backend).report for reentrant in (None, True)
    ]
    kept, recomputed = (report.held_bytes for report in reports if report is not None)
    inputs = 2 * (DEPTH + 1) * ROWS * WIDTH * 4
    assert inputs / 2 < recomputed <= 1.2 * inputs
    assert kept > 5 * recomputed


def _chunk(layer: nn.Module, forward: Any, **options: Any) -> Chunk:
    return replace(Chunk.from_module(layer, "rank 0 chunk 0", **options), forward=forward)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", ["whole", "split"])
def test_dropout_next_to_a_recomputation_repeats_the_masks_of_eager(
    backend: GraphBackend, reentrant: bool, backward: Literal["whole", "split"]
) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(backend.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(layer, nn.functional.dropout(x, 0.3), use_reentrant=reentrant)
        return nn.functional.dropout(x, 0.2)

    program = SPLIT if backward == "split" else None
    graphs = ChunkGraphs([_chunk(layer, forward, program=program)], [1], backend=backend)
    weights = WeightBackwards(graphs)
    x = torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)
    graphs.capture([x])
    results: list[list[torch.Tensor]] = []
    for uses_graphs in (False, True):
        torch.manual_seed(9)
        x.grad = None
        layer.zero_grad(set_to_none=True)
        with graphs.step(3, eager=not uses_graphs):
            for _ in range(3):
                graphs.callables[0](x).square().sum().backward()
                if backward == "split":
                    weights.run(0)
        results.append([x.grad, *(p.grad for p in layer.parameters()), torch.rand(4)])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("is_nested", [True, False])
def test_dropout_in_a_recomputation_is_refused(
    backend: GraphBackend, reentrant: bool, is_nested: bool
) -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(backend.device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=reentrant)

    def nested(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(forward, x, use_reentrant=reentrant)

    with pytest.raises(
        CaptureError,
        match=r"(?s)draws random numbers in a recomputation.*slot 0 backward.*"
        r"To do: set the dropout of what is recomputed to 0",
    ):
        _captured(_chunk(layer, nested if is_nested else forward), backend)

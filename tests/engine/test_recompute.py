"""Recomputation of activations runs inside the captured backward, and the slots hold less."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
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


def _captured(model: nn.Module, backend: GraphBackend, **options: Any) -> ChunkGraphs:
    graphs = ChunkGraphs([model], [2], backend=backend, options=CaptureOptions(**options))
    graphs.capture([torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)])
    return graphs


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("plan", ["shared_backward", "pool_per_slot"])
@pytest.mark.parametrize(("main_grad", "verify"), [(True, "poison"), (False, "shadow")])
def test_recomputation_equals_eager(
    backend: GraphBackend, reentrant: bool, plan: str, main_grad: bool, verify: str
) -> None:
    model = Deep(reentrant).to(backend.device)
    eager = copy.deepcopy(model)
    if main_grad:
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p)
    graphs = _captured(model, backend, memory_plan=plan, verify=verify)
    torch.manual_seed(3)
    batches = [torch.randn(ROWS, WIDTH, device=backend.device) for _ in range(5)]
    with graphs.step(len(batches)):
        for first, second in ((0, 1), (2, 3), (4, None)):
            flying = []
            for index in (first, second):
                if index is not None:
                    x = batches[index].clone().requires_grad_()
                    flying.append((index, x, graphs.callables[0](x)))
            for index, x, y in flying:
                y.square().sum().backward()
                twin = batches[index].clone().requires_grad_()
                eager(twin).square().sum().backward()
                assert torch.equal(x.grad, twin.grad)
    for p, twin in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.main_grad if main_grad else p.grad, twin.grad)


def test_a_slot_holds_only_the_inputs_of_what_is_recomputed(backend: GraphBackend) -> None:
    reports = [
        _captured(Deep(reentrant).to(backend.device), backend).report for reentrant in (None, True)
    ]
    kept, recomputed = (report.held_bytes for report in reports if report is not None)
    inputs = 2 * (DEPTH + 1) * ROWS * WIDTH * 4
    assert inputs / 2 < recomputed <= 1.2 * inputs
    assert kept > 5 * recomputed


def test_a_gradient_that_would_be_lost_is_refused(backend: GraphBackend) -> None:
    model = Deep(None).to(backend.device)
    extra = torch.ones(WIDTH, device=backend.device, requires_grad=True)
    chunk = Chunk(
        forward=lambda x: model(x) * extra,
        parameters=tuple(model.parameters()),
        label="rank 0 chunk 0",
        module=model,
    )
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    with pytest.raises(CaptureError, match=r"neither arguments nor among its parameters \(\(32,\)"):
        graphs.capture([torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)])


class Masked(nn.Module):
    """Layers with dropout: some recomputed, also two in one checkpoint, and one that is kept."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.GELU()) for _ in range(DEPTH)
        )
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = x + checkpoint(first, self.dropout(x), use_reentrant=self.reentrant)
        return x + checkpoint(
            lambda y: third(second(y)), self.dropout(x), use_reentrant=self.reentrant
        )


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _train(
    model: nn.Module, forward: Any, batches: list[torch.Tensor], weights: Any = None
) -> list[torch.Tensor]:
    """Run microbatches with up to two in flight; return all gradients and the random state."""
    torch.manual_seed(9)
    gradients = []
    for first in range(0, len(batches), 2):
        flying = []
        for batch in batches[first : first + 2]:
            x = batch.clone().requires_grad_()
            flying.append((x, forward(x)))
        for x, y in flying:
            y.square().sum().backward()
            gradients.append(x.grad)
        if weights is not None:
            for _ in flying:
                weights.run(0)
    state = _random_state(batches[0].device)
    return [*gradients, *(p.grad for p in model.parameters()), state]


@pytest.mark.parametrize(
    ("reentrant", "backward", "options"),
    [
        (True, "whole", {"verify": "shadow"}),
        (False, "whole", {"verify": "poison"}),
        (False, "whole", {"memory_plan": "shared_temporaries"}),
        (False, "split", {}),
    ],
)
def test_a_recomputation_repeats_the_masks_of_eager(
    backend: GraphBackend,
    reentrant: bool,
    backward: Literal["whole", "split"],
    options: dict[str, Any],
) -> None:
    model = Masked(reentrant=reentrant).to(backend.device)
    eager = copy.deepcopy(model)
    chunk = Chunk(
        forward=model.forward,
        parameters=tuple(model.parameters()),
        label="rank 0 chunk 0",
        module=model,
        backward=backward,
    )
    graphs = ChunkGraphs([chunk], [2], backend=backend, options=CaptureOptions(**options))
    graphs.capture([torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)])
    for num_microbatches in (5, 2, 3):
        batches = [torch.randn(ROWS, WIDTH, device=backend.device) for _ in range(num_microbatches)]
        for module in (model, eager):
            module.zero_grad(set_to_none=True)
        expected = _train(eager, eager, batches)
        with graphs.step(num_microbatches):
            weights = graphs.weights if backward == "split" else None
            results = _train(model, graphs.callables[0], batches, weights)
        assert all(map(torch.equal, results, expected))


def test_a_state_that_is_restored_in_its_own_capture_is_refused(backend: GraphBackend) -> None:
    """A nested checkpoint continues from a state that its own graph saved."""
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(backend.device)

    def nested(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: checkpoint(layer, y, use_reentrant=True), x, use_reentrant=True)

    chunk = Chunk(
        forward=nested,
        parameters=tuple(layer.parameters()),
        label="rank 0 chunk 0",
        module=layer,
    )
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    with pytest.raises(CaptureError, match="after the random state was restored"):
        graphs.capture([torch.randn(ROWS, WIDTH, device=backend.device, requires_grad=True)])

"""A capture session changes no model, random generator or sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.graphs import GraphBackend

WIDTH = 8


class Updating(nn.Module):
    """Updates its own state in every forward."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.embedding = nn.Embedding(WIDTH, WIDTH, max_norm=0.5)
        self.register_buffer("count", torch.zeros(2))
        self.tensor = torch.zeros(())
        self.listed: Any = [(torch.zeros(()),)]
        self.held: Any = {"deep": [torch.zeros(())]}
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            UPDATES[self.what](self)
        if self.what == "renormalised":
            return self.linear(self.embedding(x.detach().long().clamp(0, 7)[:, 0])) + x
        return self.linear(x) * (self.tensor + self.listed[0][0] + self.held["deep"][0] + 1)

    def state(self) -> list[torch.Tensor]:
        kept = [*self.parameters(), *self.buffers(), self.tensor, self.listed[0][0]]
        return [t.detach().clone() for t in (*kept, self.held["deep"][0])]


UPDATES: dict[str, Callable[[Updating], object]] = {
    "parameter": lambda m: m.linear.weight.mul_(0.9),
    "parameter's data": lambda m: m.linear.weight.data.clamp_(-0.2, 0.2),
    "part of a parameter": lambda m: m.linear.weight[1:3].mul_(0.9),
    "renormalised": lambda _: None,
    "buffer": lambda m: m.count[0].add_(1),
    "attribute": lambda m: m.tensor.add_(1),
    "list": lambda m: m.listed[0][0].add_(1),
    "dict": lambda m: m.held["deep"][0].add_(1),
}


@pytest.mark.parametrize("what", UPDATES)
def test_what_a_forward_updates_is_put_back(backend: GraphBackend, what: str) -> None:
    def run(*, captures: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = Updating(what).to(backend.device)
        for name in ("tensor", "listed", "held"):
            move(module, name, backend.device)
        graphs = ChunkGraphs([module], [1], backend=backend)
        sample = torch.full((3, WIDTH), 5.0, device=backend.device, requires_grad=True)
        if captures:
            before = module.state()
            graphs.capture([sample])
            assert all(map(torch.equal, before, module.state()))
        with graphs.step(2):
            for _ in range(2):
                graphs.callables[0](sample).sum().backward()
        return [*module.state(), *[p.grad for p in module.parameters() if p.grad is not None]]

    assert all(map(torch.equal, run(captures=False), run(captures=True)))


def move(module: Updating, name: str, device: torch.device) -> None:
    value = getattr(module, name)
    if name == "listed":
        value = [(value[0][0].to(device),)]
    elif name == "held":
        value = {"deep": [value["deep"][0].to(device)]}
    else:
        value = value.to(device)
    setattr(module, name, value)


def test_calls_without_gradients_are_no_samples(backend: GraphBackend) -> None:
    """An evaluation or a teacher's forward in a warmup step has other arguments."""
    module = nn.Linear(WIDTH, WIDTH).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    for _ in range(3):
        with graphs.step(1):
            with torch.no_grad():
                graphs.callables[0](torch.ones(5, WIDTH, device=backend.device))
            graphs.callables[0](torch.ones(3, WIDTH, device=backend.device)).sum().backward()
    assert graphs.counters.replays == 2


def test_calls_without_backward_are_no_samples(backend: GraphBackend) -> None:
    """The layouts of their output's gradients are unknown."""
    module = nn.Linear(WIDTH, WIDTH).to(backend.device)
    graphs = ChunkGraphs([module], [1], backend=backend)
    x = torch.ones(3, WIDTH, device=backend.device)
    for runs_backward in (False, True, True, True):
        with graphs.step(1):
            y = graphs.callables[0](x).sum()
            if runs_backward:
                y.backward()
    assert graphs.counters.fallbacks == {"capture warmup": 2}
    assert graphs.counters.replays == 2

"""Modules that a forward calls from outside of the chunk's module are watched like its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import Chunk, ChunkGraphs
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import RecorderBackend


class _Teacher(nn.Module):
    """A module that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.dropout = nn.Dropout(0.0)
        self.factor = 2.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(hidden)) * self.factor


class _Student(nn.Module):
    """A layer whose forward is ``call``."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.call = call
        self.teachers: list[nn.Module] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.call(self, hidden)


def _step(graphs: ChunkGraphs, x: torch.Tensor) -> torch.Tensor:
    with graphs.step(1):
        out: torch.Tensor = graphs.callables[0](x)
        out.sum().backward()
    return out.detach()


def _captured(chunk: Any) -> tuple[ChunkGraphs, torch.Tensor]:
    graphs = ChunkGraphs([chunk], [1], backend=RecorderBackend())
    x = torch.ones(2, 4)
    for _ in range(3):
        _step(graphs, x)
    assert graphs.counters.replayed_steps == 2
    return graphs, x


_CHANGES: dict[str, tuple[Callable[[_Teacher], Any], str]] = {
    "setting": (lambda t: setattr(t, "factor", 3.0), r"\.factor \(captured 2\.0, now 3\.0\)"),
    "probability": (lambda t: setattr(t.dropout, "p", 0.5), r"\.dropout\.p \(captured 0\.0"),
    "mode": (nn.Module.eval, "the mode, the hooks or the layers of"),
    "hook": (lambda t: t.linear.register_forward_hook(lambda *_: None), r"the hooks .*\.linear"),
    "layer": (lambda t: setattr(t, "dropout", nn.Dropout()), "the layers of"),
}


@pytest.mark.parametrize(("change", "message"), _CHANGES.values(), ids=_CHANGES)
@pytest.mark.parametrize("place", ["variable", "list", "attribute"])
def test_a_change_is_refused(place: str, change: Callable[[_Teacher], Any], message: str) -> None:
    teacher = _Teacher()
    calls: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "variable": lambda s, x: s.linear(x) + teacher(x),
        "list": lambda s, x: s.linear(x) + s.teachers[0](x),
        "attribute": lambda s, x: s.linear(x) + s.teacher(x),
    }
    student = _Student(calls[place])
    student.teachers.append(teacher)
    object.__setattr__(student, "teacher", teacher)  # else torch registers it
    graphs, x = _captured(student)
    assert torch.equal(_step(graphs, x), student(x))
    change(teacher)
    with pytest.raises(ReplayMismatchError, match=message):
        _step(graphs, x)
    graphs.release()
    for _ in range(3):
        _step(graphs, x)
    assert graphs.counters.capture_sessions == 2


def test_a_module_may_share_a_layer_with_the_chunk_or_with_another() -> None:
    first, second = _Teacher(), _Teacher()
    second.linear = first.linear
    student = _Student(lambda s, x: s.linear(x) + first(x) + second(x))
    first.dropout = student.dropout = nn.Dropout(0.0)
    graphs, x = _captured(student)
    second.dropout.eval()
    with pytest.raises(ReplayMismatchError, match=r"the variable second\.dropout were changed"):
        _step(graphs, x)
    second.dropout.train()
    first.factor = 3.0
    with pytest.raises(ReplayMismatchError, match=r"the variable first\.factor \(captured"):
        _step(graphs, x)


def test_a_module_around_the_chunk_may_change_elsewhere() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5))
    chunk = Chunk(lambda x: model[0](x) * 2.0, tuple(model[0].parameters()), "it", model[0])
    graphs, x = _captured(chunk)
    model[1].requires_grad_(False)
    model[2].eval()
    _step(graphs, x)
    assert graphs.counters.replayed_steps == 3

"""A loss that is a module is watched like the stage's own layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F
from toys import Apply

from chunkgraph.errors import ReplayMismatchError
from chunkgraph.pipelining import GraphedLoss, GraphedSchedule, GraphedStage


def _dropped() -> nn.Module:
    return Apply(lambda m, y, target: F.cross_entropy(m.dropout(y), target), dropout=nn.Dropout())


def _tempered() -> nn.Module:
    temperature = nn.Parameter(torch.tensor(2.0))
    return Apply(lambda m, y, to: F.cross_entropy(y / m.temperature, to), temperature=temperature)


def _schedules(module: nn.Module, loss_fn: Any) -> GraphedSchedule:
    stage = GraphedStage(module, 0, 1, torch.device("cpu"))
    loss = GraphedLoss(loss_fn)
    return GraphedSchedule(stage, lambda n: Schedule1F1B(stage, n, loss_fn=loss), (2,), loss=loss)


def _step(schedules: GraphedSchedule, **options: Any) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    schedules.step(x, target=torch.tensor([0, 1, 2, 3]), losses=losses, **options)
    return losses


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda loss: setattr(loss, name, value)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (
            lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
            _set("label_smoothing", 0.0),
            r"stage 0: loss_fn\.label_smoothing was 0\.2 .* is 0\.0 now",
        ),
        (_dropped, nn.Module.eval, r"stage 0: loss_fn\S*\.training was True"),
        (
            lambda: nn.CrossEntropyLoss(weight=torch.ones(4)),
            _set("weight", torch.arange(1.0, 5.0)),
            r"stage 0: loss_fn\.weight was replaced",
        ),
    ],
    ids=["label smoothing", "eval", "weight"],
)
def test_changes_of_the_loss_are_refused(
    one_rank: None, make: Callable[[], Any], change: Callable[[Any], object], message: str
) -> None:
    loss = make()
    schedules = _schedules(nn.Linear(4, 4), loss)
    for _ in range(2):
        _step(schedules)
    change(loss)
    with pytest.raises(ReplayMismatchError, match=message):
        _step(schedules)
    _step(schedules, eager=True)
    schedules.graphs.release()
    losses = [_step(schedules) for _ in range(3)][-1]
    assert schedules.graphs.counters.capture_sessions == 2
    if not isinstance(loss, Apply):
        eager = _step(schedules, eager=True)
        assert all(map(torch.equal, losses, eager))


def test_parameters_of_the_loss_train(one_rank: None) -> None:
    gradients = []
    for is_eager in (True, False):
        torch.manual_seed(0)
        loss = _tempered()
        schedules = _schedules(nn.Linear(4, 4), loss)
        for _ in range(3):
            _step(schedules, eager=is_eager)
        assert (schedules.graphs.counters.replays == 0) is is_eager
        gradients.append(loss.temperature.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert torch.equal(gradients[0], gradients[1])

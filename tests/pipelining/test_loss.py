"""A loss that the last stage's module computes is in its graphs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B
from torch.nn import functional as F
from toys import Apply

from chunkgraph.pipelining import GraphedSchedule, GraphedStage


def _with_loss() -> nn.Module:
    return Apply(
        lambda m, x, labels: F.cross_entropy(m.dropout(m.linear(x)) / m.temperature, labels),
        linear=nn.Linear(4, 4),
        dropout=nn.Dropout(),
        temperature=nn.Parameter(torch.tensor(2.0)),
    )


def _as_it_is(loss: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
    return loss


def test_a_stage_that_computes_the_loss_equals_eager(one_rank: None) -> None:
    results = []
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for is_eager in (True, False):
        torch.manual_seed(0)
        stage = GraphedStage(_with_loss(), 0, 1, torch.device("cpu"))
        schedules = GraphedSchedule(
            stage, lambda n, s=stage: Schedule1F1B(s, n, loss_fn=_as_it_is), (2,)
        )
        values: list[torch.Tensor] = []
        for _ in range(3):
            losses: list[torch.Tensor] = []
            labels = torch.tensor([0, 1, 2, 3])
            options = {"labels": labels, "target": labels, "losses": losses}
            schedules.step(x, **options, return_outputs=False, eager=is_eager)
            values += [loss.detach() for loss in losses]
        assert (schedules.graphs.counters.replays == 0) is is_eager
        results.append([*values, *[p.grad for p in stage.submod.parameters()]])
    assert len(results[0]) == 9
    assert all(map(torch.equal, *results))

"""A step or an evaluation that raises leaves nothing behind for the next one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from chunkgraph import CaptureOptions
from chunkgraph.pipelining import GraphedSchedule, GraphedStage


class _Loss:
    """A mean squared error that raises once, at a microbatch of a step.

    Attributes:
        raises_at: Number of calls until the one that raises; 0 for none.
    """

    raises_at = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.raises_at -= 1
        if self.raises_at == 0:
            raise ArithmeticError("the loss is not finite")
        return nn.functional.mse_loss(output, target)


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def _gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize(("cls", "failing"), [(ScheduleGPipe, 1), (Schedule1F1B, 3)])
def test_the_step_after_a_failed_one_is_equal_to_eager(
    one_rank: None, cls: type, failing: int
) -> None:
    module, loss = nn.Linear(4, 4), _Loss()
    stage = GraphedStage(module, 0, 1, torch.device("cpu"))
    schedules = GraphedSchedule(
        stage,
        lambda n: cls(stage, n, loss_fn=loss),
        (4,),
        options=CaptureOptions(num_warmup_steps=2),
    )
    for step in range(failing):
        schedules.step(_batch(step), target=_batch(9))
    loss.raises_at = 2
    with pytest.raises(ArithmeticError):
        schedules.step(_batch(3), target=_batch(4))
    for step in (5, 6, 7):
        module.zero_grad()
        losses: list[torch.Tensor] = []
        schedules.step(_batch(step), target=_batch(9), losses=losses)
        actual = [*losses, *_gradients(module)]
        module.zero_grad()
        expected = [
            nn.functional.mse_loss(module(x), y)
            for x, y in zip(_batch(step).chunk(4), _batch(9).chunk(4), strict=True)
        ]
        for microbatch in expected:
            (microbatch / 4).backward()
        expected += _gradients(module)
        assert len(actual) == len(expected)
        assert all(map(torch.equal, actual, expected))
    assert schedules.graphs.counters.replayed_steps > 0

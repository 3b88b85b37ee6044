"""`GraphedLoss`: the loss function as part of the last stage's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["GraphedLoss"]


class GraphedLoss:
    """Compute the loss of a training step within the last stage's graphs.

    Pass it to the schedules as their ``loss_fn``, and to `GraphedSchedule`. In evaluation it calls
    the loss function.

    Args:
        loss_fn: The loss function, called with the last stage's output, the microbatch's target and
            ``loss_kwargs``. The graphs train the parameters of a module, and refuse changes of it.
    """

    def __init__(self, loss_fn: Callable[..., torch.Tensor]) -> None:
        self.loss_fn = loss_fn
        self._targets: Sequence[Any] = ()
        self._kwargs: dict[str, Any] = {}
        self._computed: tuple[Any, torch.Tensor] | None = None

    def joined(self, module: nn.Module) -> nn.Module:
        """Return the last stage's module and the loss as one module, to watch both for changes.

        Parts of the stage keep their names; those of the loss begin with ``loss_fn``.
        """
        if not isinstance(self.loss_fn, nn.Module):
            return module
        both = nn.Module()
        both._modules.update({"": module, "loss_fn": self.loss_fn})
        return both

    def begin_step(self, targets: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Set the targets of the microbatches and the loss function's keyword arguments."""
        self._targets, self._kwargs, self._computed = targets, kwargs, None

    def arguments_of(self, microbatch: int) -> tuple[Any, dict[str, Any]]:
        """Return the target and the keyword arguments for the loss of a microbatch."""
        return self._targets[microbatch], self._kwargs

    def computed(self, output: Any, loss: torch.Tensor) -> None:
        """Record the loss that was computed together with ``output``."""
        self._computed = output, loss

    def __call__(self, output: Any, target: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss that was computed with this output, or compute it."""
        computed, self._computed = self._computed, None
        if computed is not None and computed[0] is output:
            return computed[1]
        return self.loss_fn(output, target, **kwargs)

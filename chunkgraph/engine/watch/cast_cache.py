"""Detect stale casts of autocast after an optimizer step inside an autocast block.

Inside one `torch.autocast` block, eager training keeps using the first casts of the parameters,
even after an optimizer step. A replay casts the current parameters. So a call is refused inside a
block in which an optimizer has updated its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["hold_stale_casts", "stepped", "watch_optimizers"]


class _Stepped:
    """Parameters updated inside an autocast block, and a leaf whose cast shows whether it ended."""

    def __init__(self) -> None:
        self.parameters = WeakTensorKeyDictionary()
        self.are_any = False
        self._leaf = nn.Parameter(torch.ones(1, 1))

    def add(self, optimizer: Optimizer) -> None:
        """Record an optimizer's step."""
        is_inside = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        if is_inside:
            self._cast_of(1.0)
            self.are_any = True
            for group in optimizer.param_groups:
                self.parameters.update(dict.fromkeys(group["params"], True))

    def has_ended(self) -> bool:
        """Return whether the cached casts of that block are gone."""
        if self._cast_of(2.0) == 1.0:
            return False
        self.parameters.clear()
        self.are_any = False
        return True

    def _cast_of(self, value: float) -> float:
        """Set the leaf to ``value``, and return the value that operators under autocast read."""
        self._leaf.data.fill_(value)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return float(torch.mm(self._leaf, torch.ones(1, 1)))


stepped = _Stepped()


@functools.cache
def watch_optimizers() -> None:
    """Register a hook, once per process, that follows all optimizers."""
    register_optimizer_step_post_hook(_after)


def hold_stale_casts(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether eager operators would read casts of these from before an optimizer step."""
    return bool(
        stepped.are_any
        and torch.is_autocast_cache_enabled()
        and any(p in stepped.parameters for p in parameters)
        and not stepped.has_ended()
    )


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    stepped.add(optimizer)

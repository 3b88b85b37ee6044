"""Casts that autocast shares for the whole of a block, though an optimizer has stepped in it.

Inside one block of `torch.autocast` eager training goes on with the casts of the parameters as they
were at first, whatever an optimizer does to them. A replay casts them as they are. So a call in a
block in which its parameters were stepped is refused.
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
    """Parameters stepped inside of a block, and a leaf whose cast shows whether it has ended."""

    def __init__(self) -> None:
        self.parameters = WeakTensorKeyDictionary()
        self.are_any = False
        self._leaf = nn.Parameter(torch.ones(1, 1))

    def add(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        is_inside = torch.autocast_increment_nesting() > 1
        torch.autocast_decrement_nesting()
        if is_inside:
            self._cast_of(1.0)
            self.are_any = True
            for group in optimizer.param_groups:
                self.parameters.update(dict.fromkeys(group["params"], True))

    def has_ended(self) -> bool:
        """Return whether the casts of that block are gone."""
        if self._cast_of(2.0) == 1.0:
            return False
        self.parameters.clear()
        self.are_any = False
        return True

    def _cast_of(self, value: float) -> float:
        """The value that operators read for the leaf, which holds ``value``."""
        self._leaf.data.fill_(value)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return float(torch.mm(self._leaf, torch.ones(1, 1)))


stepped = _Stepped()


@functools.cache
def watch_optimizers() -> None:
    """Follow all optimizers of the process; once."""
    register_optimizer_step_post_hook(_after)


def hold_stale_casts(parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether eager operators would read casts of some of these from before a step."""
    return bool(
        stepped.are_any
        and torch.is_autocast_cache_enabled()
        and any(p in stepped.parameters for p in parameters)
        and not stepped.has_ended()
    )


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    stepped.add(optimizer)

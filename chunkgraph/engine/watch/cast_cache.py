"""Detect casts of autocast that eager operators would share, and a replay does not.

Inside one `torch.autocast` block, eager training keeps using the first casts of the parameters:
even after an optimizer step, when the casts hold old values, and after a call without gradients,
when the casts have no autograd graph. A replay casts the parameters again.
So calls are refused inside a block in which either has happened.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from chunkgraph.engine.autocast import num_autocast_blocks

__all__ = ["note_call_without_gradients", "stale_casts", "watch_optimizers", "why_stale"]


class _StaleCasts:
    """Parameters with stale casts in an autocast block, and a leaf that shows whether it ended."""

    def __init__(self) -> None:
        self.parameters = WeakTensorKeyDictionary()
        self.are_any = False
        self._leaf = nn.Parameter(torch.ones(1, 1))

    def add(self, parameters: Iterable[torch.Tensor], why: str) -> None:
        """Record why casts of the parameters are stale, if called inside a block."""
        if num_autocast_blocks():
            self._cast_of(1.0)
            self.are_any = True
            self.parameters.update(dict.fromkeys(parameters, why))

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


stale_casts = _StaleCasts()


@functools.cache
def watch_optimizers() -> None:
    """Register a hook, once per process, that follows all optimizers."""
    register_optimizer_step_post_hook(_after)


def note_call_without_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Note an eager call without gradients, which may leave casts of the parameters."""
    if torch.is_autocast_cache_enabled():
        stale_casts.add(parameters, "a call without gradients has run")


def why_stale(parameters: Sequence[nn.Parameter]) -> str:
    """Return why eager operators would read stale casts of these parameters, or ""."""
    if not stale_casts.are_any or not torch.is_autocast_cache_enabled() or stale_casts.has_ended():
        return ""
    return next((stale_casts.parameters[p] for p in parameters if p in stale_casts.parameters), "")


def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stale_casts.add(parameters, "an optimizer has stepped")

"""Hooks of the engine on leaves of autograd, and those of others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LeafHook", "foreign_hooks"]


class LeafHook:
    """Call a function with a leaf before autograd adds to its gradient."""

    def __init__(self, function: Callable[[torch.Tensor], None], leaf: torch.Tensor) -> None:
        self._function = function
        self._leaf = weakref.ref(leaf)

    def __call__(self, _gradient: torch.Tensor) -> None:
        """Call the function."""
        leaf = self._leaf()
        if leaf is not None:
            self._function(leaf)


def foreign_hooks(parameter: torch.Tensor) -> list[Any]:
    """Return the hooks that wait for the gradient of ``parameter``, except the engine's."""
    after: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    before: dict[int, Any] = parameter._backward_hooks or {}
    hooks = (*before.values(), *after.values())
    return [hook for hook in hooks if type(hook) is not LeafHook]

"""Observe gradients that eager autograd adds to captured parameters.

A replay adds to gradients inside its graph, unseen by autograd. So a hook on the parameter runs
only for eager work, and costs replays nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["LeafHook", "foreign_hooks", "watch_eager_gradients"]


class _Hook:
    """Call a method of an object, unless the object is gone."""

    def __init__(self, method: Callable[[nn.Parameter], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, parameter: Any) -> None:
        method = self._method()
        if method is not None:
            method(parameter)


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


def watch_eager_gradients(
    parameters: Iterable[nn.Parameter], owner: object, method: Callable[[nn.Parameter], None]
) -> None:
    """Call ``method`` after autograd has added to the gradient of one of ``parameters``.

    Args:
        parameters: Trainable leaves.
        owner: The object of the method, referenced weakly. The hooks are removed with it.
        method: The method, called with the parameter.
    """
    hook = _Hook(method)
    handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters]
    weakref.finalize(owner, _remove, handles).atexit = False


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def foreign_hooks(parameter: torch.Tensor) -> list[Any]:
    """Return the hooks that wait for the gradient of ``parameter``, except the engine's."""
    after: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    before: dict[int, Any] = parameter._backward_hooks or {}
    hooks = (*before.values(), *after.values())
    return [hook for hook in hooks if type(hook) not in (_Hook, LeafHook)]

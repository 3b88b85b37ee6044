"""Notice new hooks by torch's count of all hooks that were ever registered.

Torch numbers every hook on a module, a tensor or a node of autograd. While the count is unchanged,
no hook was registered anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["have_node_hooks", "num_registered_hooks", "register_first"]

_probes: list[int] = [0]
"""Number of hooks that this module has registered."""


def num_registered_hooks() -> int:
    """Return how many hooks were registered in this process, without those of this module."""
    return RemovableHandle.next_id - _probes[0]


def register_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register a hook that runs before those that ``tensor`` has; it is not counted."""
    _probes[0] += 1
    handle = tensor.register_hook(hook)
    hooks: dict[int, Any] = tensor._backward_hooks  # type: ignore[assignment]
    for key in [*hooks][:-1]:  # torch calls them in the order in which they were inserted
        hooks[key] = hooks.pop(key)
    return handle


class _Edges(torch.autograd.Function):
    """An autograd node created only for its edges."""

    @staticmethod
    def forward(_ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> Any:
        raise NotImplementedError


# Bypasses the torch.func support of `apply`, the slowest part.
_new_edges: Callable[..., Any] = super(torch.autograd.Function, _Edges).apply


def have_node_hooks(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return whether autograd's node of each parameter has hooks."""
    with torch.enable_grad():
        output = _new_edges(*parameters)  # keeps the node alive
    edges = output.grad_fn.next_functions
    return [node is not None and _has_hooks(node) for node, _ in edges]


def _has_hooks(node: Any) -> bool:
    """Return whether a node has hooks, by torch's dict of hooks that every handle refers to."""
    for register in (node.register_hook, node.register_prehook):
        _probes[0] += 1
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: object) -> None:
    """Do nothing, as a hook."""

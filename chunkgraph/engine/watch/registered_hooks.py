"""New hooks, found by torch's count of all hooks that were ever registered.

Torch numbers every hook on a module, a tensor or a node of autograd. While the count stands still
there is no new hook anywhere, so that a step compares one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["have_node_hooks", "num_registered_hooks"]

_probes: list[int] = [0]
"""How many hooks this module has registered, each for a moment."""


def num_registered_hooks() -> int:
    """Return how many hooks were registered in this process, without those of this module."""
    return RemovableHandle.next_id - _probes[0]


class _Edges(torch.autograd.Function):
    """A node of which only the edges are looked at."""

    @staticmethod
    def forward(_ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return parameters[0].new_empty(0)

    @staticmethod
    def backward(_ctx: Any, *_grads: torch.Tensor) -> Any:
        raise NotImplementedError


# Without `apply`'s support of torch.func, which takes longer than all else here.
_new_edges: Callable[..., Any] = super(torch.autograd.Function, _Edges).apply


def have_node_hooks(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Return whether autograd's node of each parameter has hooks."""
    with torch.enable_grad():
        output = _new_edges(*parameters)  # the node lives as long as it does
    edges = output.grad_fn.next_functions
    return [node is not None and _has_hooks(node) for node, _ in edges]


def _has_hooks(node: Any) -> bool:
    """Return whether a node has hooks; torch keeps them in one dict, which a handle refers to."""
    for register in (node.register_hook, node.register_prehook):
        _probes[0] += 1
        handle = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*_: object) -> None:
    """Wait for nothing."""

"""Many facts of many tensors compared in one call: torch.compile's guards, where torch has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["new_guard"]


def new_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return torch.compile's guard on these tensors, or `_no_guard` if torch has none like it.

    It returns whether its arguments are different tensors and like these, one by one: type, shape,
    strides, dtype, device, ``requires_grad`` and dispatch keys.
    """
    try:
        make: Any = torch._C._dynamo.guards.TensorGuards
        guard = make(
            *tensors,
            dynamic_dims_sizes=[[*t.shape] for t in tensors],
            dynamic_dims_strides=[[*t.stride()] for t in tensors],
        )
        check: Callable[..., bool] = guard.check
        return check if check(*tensors) is True else _no_guard
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return _no_guard


def _no_guard(*_: object) -> bool:
    """Accept nothing: whoever asks compares the slow way."""
    return False

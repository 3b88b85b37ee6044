"""Compare many facts of many tensors in one call, by torch.compile's guards if torch has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["new_guard"]


def new_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return torch.compile's guard on these tensors; `_no_guard` if torch has no such guard.

    The guard returns whether its arguments are different tensors that match these one by one in
    type, shape, strides, dtype, device, ``requires_grad`` and dispatch keys.
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
    """Return False, so that callers compare the slow way."""
    return False

"""Transformer Engine's fused operations, which Megatron's layers build in their first forward.

They keep lists of parameters of their own, outside of the layer's modules, so that a capture, which
has stand-ins for parameters, would still reach the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["fused_operations_anew"]

_HELD_AS = ("_fused_ops", "_fused_impl")


@contextmanager
def fused_operations_anew(modules: Iterable[Any]) -> Iterator[None]:
    """Inside, layers build their fused operations anew, from the parameters they then have.

    Args:
        modules: layers among others.
    """
    held = [
        (module, name, vars(module)[name])
        for module in dict.fromkeys(modules)
        for name in _HELD_AS
        if isinstance(vars(module).get(name), (tuple, type(None))) and name in vars(module)
    ]
    for module, name, _ in held:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, operations in held:
            setattr(module, name, operations)

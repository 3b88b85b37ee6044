"""Rebuild Transformer Engine's fused operations for a capture.

Megatron's layers build them in their first forward. The operations keep separate lists of
parameters, outside of the layer's modules. A capture, which replaces parameters by stand-ins, would
otherwise still reach the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["rebuilt_fused_operations"]

_NAMES = ("_fused_ops", "_fused_impl")


@contextmanager
def rebuilt_fused_operations(modules: Iterable[Any]) -> Iterator[None]:
    """Make layers rebuild their fused operations from their current parameters; restore them later.

    Args:
        modules: Modules, including the layers.
    """
    originals = [
        (module, name, vars(module)[name])
        for module in dict.fromkeys(modules)
        for name in _NAMES
        if isinstance(vars(module).get(name), (tuple, type(None))) and name in vars(module)
    ]
    for module, name, _ in originals:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, operations in originals:
            setattr(module, name, operations)

"""Compare arguments that are not tensors by value.

A replay runs no Python: whatever value an argument has, the graph uses the value from the capture.
So every value gets a key that holds copies of its mutable parts; equal keys mean equal values. A
value without such a key cannot be an argument.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["Uncomparable", "key_of"]

# What these refer to may change unseen, as what a forward reads from Python may.
_BY_IDENTITY: tuple[type, ...] = (
    type(None),
    type(...),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.ModuleType,
    partial,
    nn.Module,
    Enum,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.jit.ScriptFunction,
    *([torch.distributed.ProcessGroup] if torch.distributed.is_available() else []),
)


_IDENTITY: Any = object.__eq__


class Uncomparable(Exception):  # noqa: N818
    """A value has no key.

    Args:
        where: the part of the value, such as ``.scale``; "" for the value itself.
        why: what the part is.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}" if where else why)
        self.where, self.why = where, why


def key_of(value: Any, where: str = "") -> Any:
    """Return the key of a value: its type and contents, or itself if it is compared with ``==``.

    Args:
        value: the value.
        where: the part of an argument that it is, for errors.

    Raises:
        Uncomparable: a part has no key, or refers to itself; the message names the part.
    """
    kind = type(value)
    try:
        if isinstance(value, (float, complex)):  # NaN is equal to itself, -0.0 is not 0.0
            return kind, repr(value)
        if isinstance(value, (list, tuple)):
            return kind, [key_of(v, f"{where}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, dict):
            return kind, [(key_of(k), key_of(v, f"{where}[{k!r}]")) for k, v in value.items()]
        if kind is slice:
            return kind, [key_of(v, where) for v in (value.start, value.stop, value.step)]
        if kind is types.SimpleNamespace or (is_dataclass(value) and not isinstance(value, type)):
            names = getattr(value, "__dict__", None) or [field.name for field in fields(value)]
            return kind, [(name, key_of(getattr(value, name), f"{where}.{name}")) for name in names]
    except RecursionError:
        raise Uncomparable(where, "an object that refers to itself") from None
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(value)
    if isinstance(value, torch.Tensor):
        raise Uncomparable(
            where, "a tensor that is hidden in an object; pass it as an argument, or in a dict"
        )
    if not isinstance(value, _BY_IDENTITY) and (
        kind.__eq__ is _IDENTITY or kind.__hash__ is None  # mutable, such as an array
    ):
        raise Uncomparable(where, f"an object of type {kind.__qualname__}")
    return kind, value

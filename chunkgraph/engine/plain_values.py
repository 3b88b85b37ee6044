"""Compare arguments that are not tensors by value.

A replay runs no Python: whatever value an argument has, the graph uses the value from the capture.
So every value gets a key; two keys are equal exactly if both values lead to the same graph. A value
without such a key cannot be an argument.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Same", "Uncomparable", "is_immutable", "key_of"]

_MAX_PARTS = 1000
_MAX_ARRAY_BYTES = 1 << 20

# Equal to themselves only: nothing in them changes what the forward computes, or it is checked
# elsewhere (modules).
_BY_IDENTITY = (
    type,
    types.ModuleType,
    types.MethodDescriptorType,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    np.ufunc,
    nn.Module,
    Enum,
    torch.Generator,
    torch.jit.ScriptFunction,
)
_BY_VALUE: tuple[type, ...] = (
    bool,
    int,
    str,
    bytes,
    type(None),
    type(...),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    range,
    Fraction,
    Decimal,
    np.dtype,
    torch._C._distributed_c10d.ProcessGroup if torch.distributed.is_available() else bool,
)
_IMMUTABLE = frozenset({*_BY_VALUE, float, complex, slice, torch.Size})


class Uncomparable(Exception):  # noqa: N818
    """A value has no key.

    Args:
        where: the part of the value, such as ``.scale``; "" for the value itself.
        why: the problem.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}" if where else why)
        self.where, self.why = where, why


def is_immutable(value: object) -> bool:
    """Return whether the same object always has the same value."""
    return type(value) in _IMMUTABLE or isinstance(value, (Enum, nn.Module))


def key_of(value: object) -> Any:
    """Return the key of a value; the key holds copies of mutable parts.

    Raises:
        Uncomparable: a part has no key; the message names the part.
    """
    return _Keys().of(value, "")


class _Keys:
    """The keys of one value's parts."""

    def __init__(self) -> None:
        self._num_parts = 0
        self._open: set[int] = set()

    def of(self, value: Any, where: str) -> Any:
        """Make the key of one part."""
        kind = type(value)
        if kind in _BY_VALUE or isinstance(value, PurePath):
            return kind, value
        if kind is float or kind is complex:  # NaN is equal to itself, -0.0 is not 0.0
            parts = (value.real, value.imag)
            return kind, struct.pack("dd", *parts)
        if isinstance(value, _BY_IDENTITY) or _is_function_of_c(value):
            return Same(value)
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise Uncomparable(where, f"it has more than {_MAX_PARTS} parts to compare")
        if id(value) in self._open:
            raise Uncomparable(where, "it refers to itself")
        self._open.add(id(value))
        try:
            return kind, self._parts(value, where)
        finally:
            self._open.remove(id(value))

    def _parts(self, value: Any, where: str) -> Any:
        make = self._maker(value)
        if make is not None:
            return make(value, where)
        if isinstance(value, torch.Tensor):
            raise Uncomparable(
                where, "a tensor that is hidden in an object; pass it as an argument, or in a dict"
            )
        raise Uncomparable(where, f"an object of type {type(value).__qualname__}")

    def _maker(self, value: Any) -> Callable[[Any, str], Any] | None:
        kind = type(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array
        if isinstance(value, (list, tuple)):
            return self._sequence
        if isinstance(value, dict):
            return self._dict
        if isinstance(value, (set, frozenset)):
            return self._set
        if kind is slice:
            return lambda v, w: self._each((v.start, v.stop, v.step), w)
        if kind is bytearray:
            return lambda v, _: bytes(v)
        if kind is types.FunctionType:
            return self._function
        if kind is types.MethodType:
            return lambda v, w: self._each((v.__func__, v.__self__), w)
        if kind is partial:
            return lambda v, w: self._each((v.func, v.args, v.keywords), w)
        if kind is types.SimpleNamespace or (is_dataclass(value) and not isinstance(value, type)):
            return self._attributes
        return None

    def _each(self, values: Iterable[Any], where: str) -> tuple[Any, ...]:
        return tuple([self.of(v, where) for v in values])

    def _sequence(self, value: Any, where: str) -> Any:
        items = tuple([self.of(v, f"{where}[{i}]") for i, v in enumerate(value)])
        return items, self._own_attributes(value, where)

    def _dict(self, value: Any, where: str) -> Any:
        items = [(self.of(k, where), self.of(v, f"{where}[{k!r}]")) for k, v in value.items()]
        return tuple(items), self._own_attributes(value, where)

    def _set(self, value: Any, where: str) -> Any:
        return frozenset(self._each(value, where)), self._own_attributes(value, where)

    def _array(self, value: Any, where: str) -> Any:
        if value.dtype.hasobject or not (
            type(value) is np.ndarray or isinstance(value, np.generic)
        ):
            raise Uncomparable(where, f"a {type(value).__qualname__} of {value.dtype}")
        if value.nbytes > _MAX_ARRAY_BYTES:
            raise Uncomparable(
                where,
                f"an array of {value.nbytes} bytes; pass it as a tensor (torch.from_numpy)",
            )
        return str(value.dtype), value.shape, value.tobytes()

    def _function(self, value: Any, where: str) -> Any:
        """Return the key of a function by its variables: lambdas over equal values are equal."""
        cells = []
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                contents = cell.cell_contents
            except ValueError:
                raise Uncomparable(where, f"a function whose {name!r} is not set yet") from None
            cells.append(self.of(contents, f"{where} (its variable {name!r})"))
        defaults = self._each((value.__defaults__, value.__kwdefaults__), where)
        return (
            Same(value.__code__),
            Same(value.__globals__),
            tuple(cells),
            defaults,
            self._own_attributes(value, where),
        )

    def _attributes(self, value: Any, where: str) -> Any:
        fields = getattr(value, "__dataclass_fields__", {})
        names = [*fields, *(n for n in getattr(value, "__dict__", {}) if n not in fields)]
        return tuple(
            [
                (name, self.of(getattr(value, name), f"{where}.{name}"))
                for name in names
                if hasattr(value, name)
            ]
        )

    def _own_attributes(self, value: Any, where: str) -> Any:
        own = getattr(value, "__dict__", None)
        return self._attributes(value, where) if own else None


def _is_function_of_c(value: Any) -> bool:
    """Return whether a value is a built-in function that is not bound to a mutable object."""
    return isinstance(value, types.BuiltinFunctionType) and (
        value.__self__ is None or isinstance(value.__self__, (types.ModuleType, type))
    )


class Same:
    """A key equal only for the same object, which it keeps alive so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

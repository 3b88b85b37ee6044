"""Compare the values that the Python code of forwards reads from outside of its arguments.

A replay runs no Python: it would keep a captured factor that is a global variable, a closure's
variable, or a part of a list, a dict or a configuration object (see `variables_of`).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkgraph._text import shown
from chunkgraph.engine.watch.variables import (
    CODE,
    CONTAINERS,
    UNSET,
    Variable,
    has_attributes,
    is_small_array,
)
from chunkgraph.errors import ReplayMismatchError

__all__ = ["ReadValues"]


class Same:
    """A key equal only for the same object, which it keeps alive so that its id is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_SCALARS = (bool, int, str, bytes, types.NoneType, torch.dtype, torch.device)
_MAX_DEPTH = 4
_MAX_PARTS = 1000
_NOTHING: dict[str, Any] = {}


@dataclass
class _Key:
    """A value at one time, equal to another one of the same types and bits.

    Attributes:
        kind: Type of the value.
        value: The value, or `Same` for one that is compared by identity. The order of ``parts``
            for containers.
        parts: Keys of items and attributes, by their text.
    """

    kind: type
    value: Any
    parts: dict[str, _Key] = field(default_factory=dict)

    def __str__(self) -> str:
        value = self.value.value if isinstance(self.value, Same) else self.value
        if isinstance(value, torch.Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        if self.parts and type(value) is tuple:
            return f"a {self.kind.__name__} of {len(self.parts)} values"
        return str(value) if self.kind in (float, complex) else shown(value)


class _Keys:
    """The keys of variables in one comparison."""

    def __init__(self) -> None:
        # Keys of objects so far, which many layers may share.
        self._objects: dict[tuple[int, int, int, bool], _Key] = {}
        self._num_parts = 0

    def of(self, variable: Variable) -> _Key:
        """Return a key of the present value."""
        self._num_parts = 0
        return self._key(variable.read(), 0, variable)

    def _key(self, value: Any, depth: int, variable: Variable) -> _Key:
        kind = type(value)
        if kind in _SCALARS:
            return _Key(kind, value)
        if kind is float or kind is complex:
            return _Key(kind, repr(value))  # NaN is equal to itself, -0.0 is not 0.0
        if is_small_array(value):
            return _Key(kind, repr(value.tolist()))
        if isinstance(value, (set, frozenset)):
            return _Key(kind, frozenset(value) if len(value) <= _MAX_PARTS else Same(value))
        is_container = isinstance(value, CONTAINERS)
        if is_container:
            self._num_parts += len(value)
        if depth == _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            return _Key(kind, Same(value))
        place = (id(value), id(variable.attributes), depth, variable.has_tensors)
        if not is_container and place in self._objects:
            return self._objects[place]
        keys = {
            name: self._key(part, depth + 1, variable)
            for name, part in _parts(value, variable.attributes).items()
            if part is not UNSET and (variable.has_tensors or not isinstance(part, torch.Tensor))
        }
        key = _Key(kind, tuple(keys) if is_container else Same(value), keys)
        if not is_container:
            self._objects[place] = key
        return key


class ReadValues:
    """Values that the forwards of a chunk read from globals, closures and objects.

    Layers, functions, tensors and modules of libraries count as the same object; containers and
    other objects by their parts that the code names. Plain attributes are those of `LayerSettings`,
    tensors in them those of `OutsideTensors`. What code changes itself is that of `AttributeWatch`.

    Args:
        label: Label of the chunk.
        variables: The variables that forwards name.
    """

    def __init__(self, label: str, variables: Iterable[Variable]) -> None:
        self._label = label
        self._variables = [v for v in variables if not v.is_changed]
        self._captured = self._now()

    def check(self) -> None:
        """Compare all values.

        Raises:
            ReplayMismatchError: One has changed since the capture.
        """
        now = self._now()
        if now == self._captured:
            return
        changes = [
            change
            for variable, captured, present in zip(
                self._variables, self._captured, now, strict=True
            )
            for change in _changes(variable.text, captured, present)
        ]
        raise ReplayMismatchError(
            f"{self._label}: {', '.join(changes)} was changed after capture, and the forward "
            "reads it; a replay would ignore this. Pass it as an argument, release the graphs and "
            "capture again, or ask for an eager step (`step(eager=True)`)."
        )

    def _now(self) -> list[_Key]:
        keys = _Keys()
        return [*map(keys.of, self._variables)]


def _parts(value: Any, attributes: Iterable[str]) -> dict[str, Any]:
    """Return the items of a container, or the attributes of an object, by their text."""
    if isinstance(value, dict):
        return {f"[{name!r}]": part for name, part in value.items()}
    if isinstance(value, CONTAINERS):
        return {f"[{i}]": part for i, part in enumerate(value)}
    if isinstance(value, ContextVar):
        return {".get()": value.get(UNSET)}
    if has_attributes(value):
        return {f".{name}": _attribute(value, name) for name in attributes}
    return {}


def _changes(text: str, captured: _Key | None, now: _Key | None) -> Iterator[str]:
    """Yield the parts of a value that differ, with their captured values and their present ones."""
    if captured == now:
        return
    if (
        captured is None
        or now is None
        or not (captured.parts and captured.parts.keys() & now.parts)
    ):
        yield f"{text} (captured {captured or 'nothing'}, now {now or 'nothing'})"
        return
    if captured.parts == now.parts:
        yield f"the order of {text}"
    for name in {**captured.parts, **now.parts}:
        yield from _changes(f"{text}{name}", captured.parts.get(name), now.parts.get(name))


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without a call of Python code; `UNSET` for none, and for methods."""
    part = getattr(value, "__dict__", _NOTHING).get(name, UNSET)
    if part is not UNSET:
        return part
    part = getattr(value if isinstance(value, type) else type(value), name, UNSET)
    if isinstance(part, types.MemberDescriptorType):  # of `__slots__`
        return getattr(value, name, UNSET)
    return UNSET if isinstance(part, CODE) else part

"""Find values that a forward or backward sets in Python, which a replay would not set.

These are plain attributes of its module, and variables that its code uses (see `variables_of`). A
replay runs no Python. A counter would stand still, and a tensor on the module would stay the one
from the last capture, in memory that graphs overwrite. Values that only a first call sets (a cache,
a shape) are allowed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import chain, islice, repeat
from numbers import Number
from typing import Any

import numpy as np
import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import TORCHS_NAMES, Container, containers, containers_below
from chunkgraph.engine.watch.variables import (
    CONTAINERS,
    UNSET,
    Variable,
    has_attributes,
    is_small_array,
)
from chunkgraph.errors import CaptureError

__all__ = ["AttributeWatch"]

_PLAIN = (type(None), Number, str, bytes, Enum, np.generic, np.ndarray, torch.dtype, torch.device)

_Snapshot = tuple[list[Any], list[Any]]
"""Copies of containers; values of variables, each with a copy if it is a set or an array."""


class _State:
    """Values in containers, and of variables.

    Args:
        holders: The containers.
        variables: The variables.
        used: For each container, the names of attributes and variables that count; all by default.
    """

    def __init__(
        self,
        holders: Sequence[Container],
        variables: Sequence[Variable] = (),
        used: Iterable[Collection[str] | None] = repeat(None),
    ) -> None:
        self._containers = [
            (container, names)
            for container, names in zip(holders, used, strict=False)
            if not (container.are_attributes and container.values is not vars(container.owner))
        ]
        self._variables = variables

    def now(self) -> _Snapshot:
        """Return the present values."""
        values = [v.read() for v in self._variables]
        return (
            [_copy(c.values) for c, _ in self._containers],
            [(value, _contents(value)) for value in values],
        )

    def differences(self, before: _Snapshot) -> Iterator[str]:
        """Yield the name of each value that has changed."""
        for (container, used), old in zip(self._containers, before[0], strict=True):
            for key, then, now in _changes(container, old):
                if _differ(then, now) and (used is None or container.identifier(key) in used):
                    yield container.name(key)
        for variable, (then, contents) in zip(self._variables, before[1], strict=True):
            now = variable.read()
            if _differ(then, now) or (now is then and not _has_contents(now, contents)):
                yield variable.text

    def put_back(self, before: _Snapshot) -> None:
        """Set all values to earlier ones."""
        for variable, (old, contents) in zip(self._variables, before[1], strict=True):
            if variable.read() is not old:
                variable.write(old)
            if not _has_contents(old, contents):
                _set_contents(old, contents)
        for (container, _), old in zip(self._containers, before[0], strict=True):
            values = container.values
            if not isinstance(values, dict):
                if not _same_items(old, list(values)):
                    values.clear()
                    values.extend(old)
                continue
            changes = _changes(container, old)
            if changes and not container.are_attributes:  # also in the old order
                values.clear()
                for key, value in old.items():
                    values[key] = value
                continue
            for key, then, _ in changes:
                if then is UNSET:
                    del values[key]
                else:
                    values[key] = then


class AttributeWatch:
    """Watch the Python state of one chunk in a capture session.

    Args:
        chunk: The chunk, with the module as it is inside the session.
        variables: The variables that the code of its forward names.

    Attributes:
        chunk: The chunk with a watched forward.

    Raises:
        CaptureError: The code uses an iterator.
    """

    def __init__(self, chunk: Chunk, variables: Sequence[Variable]) -> None:
        self.chunk = replace(chunk, forward=self._watched(chunk.forward))
        self._label = chunk.label
        used = [v for v in variables if v.is_used]
        _refuse_iterators(chunk.label, used)
        values = [(v.text, v.read()) for v in used]
        values = [(text, value if _may_hold_state(value) else None) for text, value in values]
        own = containers(chunk.module, chunk.module_name) if chunk.module is not None else []
        self._attributes = _State(own)
        below = containers_below(values, chunk.module)
        names = [v.used for v, every in zip(used, below, strict=True) for _ in every]
        self._variables = _State([*chain.from_iterable(below)], used, names)
        self._begin = self._attributes.now(), self._variables.now()
        self._before = self._begin[1]
        self._num_forwards = 0
        self._set_first: list[str] = []
        self._changed: list[str] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Refuse, at the end of the session, values that every pass changes; restore them.

        Raises:
            CaptureError: There are such values; the message names them.
        """
        try:
            yield
        except BaseException:
            self._put_back()
            raise
        self._compare_variables()
        if self._num_forwards == 1:  # a second forward might have changed them again
            self._changed += self._set_first
        if self._changed:
            self._put_back()
            names = ", ".join(dict.fromkeys(self._changed))
            raise CaptureError(
                f"{self._label}: its forward sets {names}. A replay runs no Python, so it would "
                "keep the value from the capture. Return the value from the forward, or keep it in "
                "a buffer that is updated in place (add_, copy_). If only a first call sets it, "
                "run one eager step before, or capture with a warmup pass."
            )

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._compare_variables()
            attributes, self._before = self._attributes.now(), self._variables.now()
            result = forward(*args, **kwargs)
            self._num_forwards += 1
            self._note(self._attributes.differences(attributes))
            return result

        return watched

    def _compare_variables(self) -> None:
        """Note what the last forward has changed, and backwards since then."""
        if self._num_forwards:
            self._note(self._variables.differences(self._before))

    def _note(self, changes: Iterator[str]) -> None:
        (self._set_first if self._num_forwards == 1 else self._changed).extend(changes)

    def _put_back(self) -> None:
        self._attributes.put_back(self._begin[0])
        self._variables.put_back(self._begin[1])


def _refuse_iterators(label: str, variables: Sequence[Variable]) -> None:
    """Refuse iterators, before a session advances them.

    Files, and other objects with ``__next__``, count only if the code calls ``next``.

    Raises:
        CaptureError: There is one.
    """
    for variable in variables:
        value = variable.read()
        is_built_in = type(value).__module__ in ("builtins", "itertools")
        if isinstance(value, Iterator) and (is_built_in or "next" in variable.used):
            raise CaptureError(
                f"{label}: its forward reads {variable.text}, an iterator. A replay runs no "
                "Python, so it would not advance it. Take the next value outside, and pass it as "
                "an argument."
            )


def _may_hold_state(value: Any) -> bool:
    """Return whether a value may hold state in lists, dicts and attributes."""
    return isinstance(value, (*CONTAINERS, deque)) or (
        not isinstance(value, type) and has_attributes(value)
    )


def _contents(value: Any) -> Any:
    """Return a copy of a set or a small array; None for another value."""
    return value.copy() if type(value) is set or is_small_array(value) else None


def _has_contents(value: Any, contents: Any) -> bool:
    if contents is None or type(value) is set:
        return contents is None or contents == value
    return _same(value, contents)


def _set_contents(value: Any, contents: Any) -> None:
    if type(value) is set:
        value.clear()
        value.update(contents)
    else:
        value[...] = contents


def _copy(values: Any) -> Any:
    return dict(values) if isinstance(values, dict) else list(values)


def _changes(container: Container, old: Any) -> list[tuple[Any, Any, Any]]:
    """Return (key, old value, new value) of each object that was replaced or has moved."""
    values = container.values
    if not isinstance(values, dict):
        now = list(values)
        if _same_items(old, now):
            return []
        longest = range(max(len(old), len(now)))
        return [(i, _at(old, i), _at(now, i)) for i in longest if _at(old, i) is not _at(now, i)]
    changes = [
        (key, old.get(key, UNSET), value)
        for key, value in values.items()
        if old.get(key, UNSET) is not value
    ]
    if len(values) != len(old) or changes:
        changes += [(key, value, UNSET) for key, value in old.items() if key not in values]
    if container.are_attributes:
        return [change for change in changes if change[0] not in TORCHS_NAMES]
    moved = (key for key, before in zip(values, old, strict=False) if key is not before)
    return changes or [(key, UNSET, None) for key in islice(moved, 1)]


def _at(items: Sequence[Any], index: int) -> Any:
    return items[index] if index < len(items) else UNSET


def _same_items(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _is_state(value: Any) -> bool:
    """Return whether a value is plain or a tensor, or holds only such values."""
    if type(value) in weakref.ProxyTypes:  # its object may be gone
        return False
    if value is UNSET or isinstance(value, (*_PLAIN, torch.Tensor)):
        return True
    if isinstance(value, dict):
        return all(map(_is_state, value.values()))
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(_is_state, value))


def _differ(then: Any, now: Any) -> bool:
    """Return whether two values are state, and not equal."""
    return now is not then and _is_state(now) and _is_state(then) and not _same(then, now)


def _same(a: Any, b: Any) -> bool:
    """Return whether two such values are equal; tensors are equal if they are one object."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor) or a is UNSET:
        return False
    if isinstance(a, np.ndarray):
        return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)

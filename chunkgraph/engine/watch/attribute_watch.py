"""Find values that a forward sets in plain attributes of its module, which a replay would not set.

A replay runs no Python. A counter would stand still, and a tensor on the module would stay the one
from the last capture, in memory that graphs overwrite. Values that only a first call sets (a cache,
a shape) are allowed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import TORCHS_NAMES, Container, containers
from chunkgraph.errors import CaptureError

__all__ = ["AttributeWatch"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_MISSING = object()

_Snapshot = list[tuple[Container, Any]]


class AttributeWatch:
    """Watch the attributes of one chunk's module in a capture session.

    Args:
        chunk: The chunk, with the module as it is inside the session.

    Attributes:
        chunk: The chunk with a watched forward.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = replace(chunk, forward=self._watched(chunk.forward))
        self._label = chunk.label
        holders = containers(chunk.module, chunk.module_name) if chunk.module is not None else []
        self._containers = [
            c for c in holders if not (c.are_attributes and c.values is not vars(c.owner))
        ]
        self._begin = self._now()
        self._num_forwards = 0
        self._set_first: list[str] = []
        self._changed: list[str] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Refuse, at the end of the session, attributes that every forward changes; restore them.

        Raises:
            CaptureError: There are such attributes; the message names them.
        """
        try:
            yield
        except BaseException:
            self._put_back()
            raise
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
            before = self._now()
            result = forward(*args, **kwargs)
            self._num_forwards += 1
            changed = list(self._differences(before))
            (self._set_first if self._num_forwards == 1 else self._changed).extend(changed)
            return result

        return watched

    def _now(self) -> _Snapshot:
        return [(c, _copy(c.values)) for c in self._containers]

    def _differences(self, before: _Snapshot) -> Iterator[str]:
        """Yield the name of each value that has changed."""
        for container, old in before:
            for key, then, now in _changes(container, old):
                if _is_state(now) and _is_state(then) and not _same(then, now):
                    yield container.name(key)

    def _put_back(self) -> None:
        for container, old in self._begin:
            values = container.values
            if not isinstance(values, dict):
                if not _same_items(old, list(values)):
                    values.clear()
                    values.extend(old)
                continue
            for key, then, _ in _changes(container, old):
                if then is _MISSING:
                    del values[key]
                else:
                    values[key] = then


def _copy(values: Any) -> Any:
    return dict(values) if isinstance(values, dict) else list(values)


def _changes(container: Container, old: Any) -> list[tuple[Any, Any, Any]]:
    """Return (key, old value, new value) of each object that was replaced."""
    values = container.values
    if not isinstance(values, dict):
        now = list(values)
        if _same_items(old, now):
            return []
        longest = range(max(len(old), len(now)))
        return [(i, _at(old, i), _at(now, i)) for i in longest if _at(old, i) is not _at(now, i)]
    changes = [
        (key, old.get(key, _MISSING), value)
        for key, value in values.items()
        if old.get(key, _MISSING) is not value
    ]
    if len(values) != len(old) or changes:
        changes += [(key, value, _MISSING) for key, value in old.items() if key not in values]
    if container.are_attributes:
        return [change for change in changes if change[0] not in TORCHS_NAMES]
    return changes


def _at(items: Sequence[Any], index: int) -> Any:
    return items[index] if index < len(items) else _MISSING


def _same_items(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _is_state(value: Any) -> bool:
    """Return whether a value is plain or a tensor, or holds only such values."""
    if type(value) in weakref.ProxyTypes:  # its object may be gone
        return False
    if value is _MISSING or isinstance(value, (*_PLAIN, torch.Tensor)):
        return True
    if isinstance(value, dict):
        return all(map(_is_state, value.values()))
    return isinstance(value, (list, tuple)) and all(map(_is_state, value))


def _same(a: Any, b: Any) -> bool:
    """Return whether two such values are equal; tensors are equal if they are one object."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor) or a is _MISSING:
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)

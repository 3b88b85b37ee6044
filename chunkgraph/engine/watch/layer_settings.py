"""Check that layers have the classes and settings that they were captured with.

A replay runs no Python, so it would keep a captured probability, temperature or flag.
"""

from __future__ import annotations

import dis
import functools
import numbers
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import call, itemgetter
from typing import Any

import torch
from torch import nn

from chunkgraph._text import shown
from chunkgraph.errors import ReplayMismatchError

__all__ = ["LayerSettings"]

_VALUES = (numbers.Number, str, types.NoneType, torch.dtype)
_PLAIN = (*_VALUES, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_METHODS = (types.FunctionType, classmethod, staticmethod, property)
_UNSET = object()


class LayerSettings:
    """Numbers, flags, strings, tuples of them, and functions in attributes of a chunk's layers.

    Numbers, flags, strings and methods also count in attributes of the layers' classes; of torch's
    classes, their ``forward`` alone.

    Args:
        label: Label of the chunk.
        layers: Each layer with its name.
        only_torchs: Whether only layers of `torch.nn` count, since forwards and schedules set
            attributes of the others.
    """

    def __init__(
        self, label: str, layers: Iterable[tuple[str, nn.Module]], *, only_torchs: bool
    ) -> None:
        self._label = label
        named = [
            (path, layer)
            for path, layer in layers
            if not only_torchs or type(layer).__module__.startswith("torch.nn.")
        ]
        self._layers = [layer for _, layer in named]
        self._attributes = [vars(layer) for layer in self._layers]
        self._captured = [
            (path, type(layer), own, {name: own[name] for name in _settings(layer)})
            for (path, layer), own in zip(named, self._attributes, strict=True)
        ]
        read = [(own, [*captured]) for _, _, own, captured in self._captured if captured]
        self._read = [own for own, _ in read]
        self._readers = [itemgetter(*names) for _, names in read]
        # Attributes of classes, and layers that do not have them themselves.
        self._of_classes: dict[tuple[type, str], Any] = {}
        self._unset: list[tuple[str, dict[str, Any], str]] = []
        for path, kind, own, _ in self._captured:
            for cls, name in _class_settings(kind):
                self._of_classes[cls, name] = vars(cls)[name]
                if name not in own and name != "forward":  # that of layers is compared below
                    self._unset.append((f"{path}{path and '.'}{name}", own, name))
        self._values = self._now()

    def check(self) -> None:
        """Compare all settings.

        Raises:
            ReplayMismatchError: One has changed since the capture, or is gone.
        """
        with suppress(Exception):  # one was deleted, or cannot be compared any more
            if self._now() == self._values:
                return
        changes = ", ".join(self._changes())
        if changes:
            raise ReplayMismatchError(
                f"{self._label}: {changes} was changed after capture; replays would ignore this. "
                "Release the graphs and capture again, or ask for an eager step "
                "(`step(eager=True)`)."
            )

    def _now(self) -> list[Any]:
        return [
            *map(type, self._layers),
            *map(dict.get, self._attributes, repeat("forward")),
            *map(call, self._readers, self._read),
            *self._class_values_now(),
            *[name in own for _, own, name in self._unset],
        ]

    def _class_values_now(self) -> list[Any]:
        return [vars(cls).get(name, _UNSET) for cls, name in self._of_classes]

    def _changes(self) -> Iterator[str]:
        """Yield each setting that differs, with its captured value and its present one."""
        forwards = self._values[len(self._layers) :]
        for layer, (path, kind, own, captured), forward in zip(
            self._layers, self._captured, forwards, strict=False
        ):
            if type(layer) is not kind:
                yield f"{path or 'chunk'} (captured {kind.__name__}, now {type(layer).__name__})"
            for name, value in {"forward": forward, **captured}.items():
                now = own.get(name)
                if not _is_same(now, value):
                    what = f"captured {shown(value)}, now {shown(own.get(name, 'nothing'))}"
                    yield f"{path}{path and '.'}{name} ({what})"
        of_classes = zip(self._of_classes.items(), self._class_values_now(), strict=True)
        yield from (
            f"{cls.__name__}.{name} (captured {shown(value)}, now "
            f"{'nothing' if now is _UNSET else shown(now)})"
            for ((cls, name), value), now in of_classes
            if not _is_same(now, value)
        )
        yield from (
            f"{path} (captured with the value of its class, now {shown(own[name])})"
            for path, own, name in self._unset
            if name in own
        )


def _is_same(now: Any, captured: Any) -> bool:
    """Return whether two settings are equal, also two that are not a number."""
    if now is captured:
        return True
    with suppress(Exception):
        return type(now) is type(captured) and (now == captured or repr(now) == repr(captured))
    return False


def _settings(layer: nn.Module) -> list[str]:
    """Return the names of a layer's settings, without attributes that its forward sets."""
    stored = _stored_in(getattr(type(layer).forward, "__code__", None))
    return [
        name
        for name, value in vars(layer).items()
        if name != "training" and name not in stored and _is_setting(value)
    ]


def _class_settings(kind: type) -> list[tuple[type, str]]:
    """Return the classes and names of the settings that a layer has from its class."""
    stored = _stored_in(getattr(kind.forward, "__code__", None))  # type: ignore[attr-defined]
    return [
        (cls, name)
        for cls in kind.__mro__
        if cls is not object
        for name, value in vars(cls).items()
        if name == "forward"
        or (
            cls.__module__.partition(".")[0] != "torch"
            and not name.startswith("__")
            and name not in stored
            and issubclass(type(value), (*_VALUES, *_METHODS, tuple))
            and (issubclass(type(value), _METHODS) or _is_setting(value))
        )
    ]


@functools.cache
def _stored_in(code: types.CodeType | None) -> frozenset[str]:
    """Return the attributes that a function sets."""
    instructions = dis.get_instructions(code) if code is not None else ()
    return frozenset(i.argval for i in instructions if i.opname == "STORE_ATTR")


def _is_setting(value: Any) -> bool:
    kind = type(value)  # that of a weak proxy, whose object may be gone
    return all(map(_is_setting, value)) if issubclass(kind, tuple) else issubclass(kind, _PLAIN)

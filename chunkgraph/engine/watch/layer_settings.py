"""Check that layers have the classes and settings that they were captured with.

A replay runs no Python, so it would keep a captured probability, temperature or flag.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import repeat
from operator import call, itemgetter
from typing import Any

from torch import nn

from chunkgraph.errors import ReplayMismatchError

__all__ = ["LayerSettings"]

_PLAIN = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        type(None),
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
    }
)


class LayerSettings:
    """Numbers, flags, strings, tuples of them, and functions in attributes of a chunk's layers.

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
            (path, type(layer), own, {name: own[name] for name in _settings(own)})
            for (path, layer), own in zip(named, self._attributes, strict=True)
        ]
        read = [(own, [*captured]) for _, _, own, captured in self._captured if captured]
        self._read = [own for own, _ in read]
        self._readers = [itemgetter(*names) for _, names in read]
        self._values = self._now()

    def check(self) -> None:
        """Compare all settings.

        Raises:
            ReplayMismatchError: One has changed since the capture, or is gone.
        """
        with suppress(KeyError, RuntimeError, ValueError):  # one was deleted, or is a tensor
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
        ]

    def _changes(self) -> Iterator[str]:
        """Yield each setting that differs, with its captured value and its present one."""
        for layer, (path, kind, own, captured) in zip(self._layers, self._captured, strict=True):
            if type(layer) is not kind:
                yield f"{path or 'chunk'} (captured {kind.__name__}, now {type(layer).__name__})"
            settings = {"forward": None, **captured}
            for name, value in settings.items():
                now = own.get(name)
                if not (now is value or (type(now) is type(value) and bool(now == value))):
                    what = f"captured {value!r}, now {own.get(name, 'nothing')!r}"
                    yield f"{path}{path and '.'}{name} ({what})"


def _settings(attributes: dict[str, Any]) -> list[str]:
    return [name for name, v in attributes.items() if name != "training" and _is_setting(v)]


def _is_setting(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_setting, value))
    return type(value) in _PLAIN

"""Find all places where a module keeps values: attributes, and lists, dicts, objects in them."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

__all__ = ["Container", "containers"]

_MAX_DEPTH = 4
"""Most lists, dicts, tuples and objects between a module and a value."""

_MAX_ITEMS = 4096
"""A longer list or dict holds data, not layers."""

_TORCHS_NAMES = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps a module's parts, hooks and mode."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, nn.Parameter, torch.Tensor})

_OPAQUE = (
    type,
    Enum,
    torch.Tensor,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)

_OPAQUE_PACKAGES = frozenset({"builtins", "functools", "torch"})


@dataclass(frozen=True)
class Container:
    """A dict, list or deque that values can be replaced in.

    Attributes:
        owner: the object that has the values, or the list or dict with them, as attributes.
        values: the dict, list or deque itself.
        path: path of the container from the root module.
        are_attributes: whether the keys are names of attributes.
    """

    owner: Any
    values: Any
    path: str
    are_attributes: bool = False

    def entries(self) -> list[tuple[Any, Any]]:
        """Return the present keys and values, without weak proxies, whose object may be gone."""
        values = self.values
        items = values.items() if isinstance(values, dict) else enumerate(values)
        excluded = (
            _TORCHS_NAMES
            if self.are_attributes and isinstance(self.owner, nn.Module)
            else frozenset()
        )
        return [
            (key, value)
            for key, value in items
            if type(value) not in weakref.ProxyTypes and key not in excluded
        ]

    def name(self, key: Any) -> str:
        """Return the expression for the value of ``key``, as a user writes it."""
        return f"{self.path}.{key}".lstrip(".") if self.are_attributes else f"{self.path}[{key!r}]"


def containers(module: nn.Module, name: str = "") -> list[Container]:
    """Return all containers of ``module`` and its parts, each once.

    Modules that lie in plain attributes and lists are walked too. Objects of torch and of the
    standard library are not.

    Args:
        module: the root.
        name: name of the module, a prefix of paths.
    """
    parts = list(module.named_modules())
    walk = _Walk({id(part) for _, part in parts})
    every: list[Container] = []
    for path, part in parts:
        every.extend(walk.of_module(part, ".".join(p for p in (name, path) if p), 0))
    return every


class _Walk:
    """One walk over a module.

    Args:
        registered: ids of the parts that the root registers; they have their own names.
    """

    def __init__(self, registered: set[int]) -> None:
        self._registered = registered
        self._seen: set[int] = set()

    def of_module(self, module: nn.Module, path: str, depth: int) -> Iterator[Container]:
        """Yield the containers of a module and, if the root does not register it, of its parts."""
        for values in (module._parameters, module._buffers):
            yield Container(module, values, path, are_attributes=True)
        attributes = Container(module, vars(module), path, are_attributes=True)
        yield attributes
        yield from self._below(attributes, depth)
        if depth:
            for key, part in module._modules.items():
                yield from self._in(part, module, f"{path}.{key}", depth)

    def _below(self, container: Container, depth: int) -> Iterator[Container]:
        for key, value in container.entries():
            if type(value) not in _PLAIN:
                yield from self._in(value, container.owner, container.name(key), depth + 1)

    def _in(self, value: Any, owner: Any, path: str, depth: int) -> Iterator[Container]:
        kind = type(value)
        if depth > _MAX_DEPTH or kind in _PLAIN or kind in weakref.ProxyTypes:
            return
        if id(value) in self._registered or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._seen.add(id(value))
            yield from self.of_module(value, path, depth)
        elif isinstance(value, tuple):
            for index, item in enumerate(value[:_MAX_ITEMS]):
                yield from self._in(item, owner, f"{path}[{index}]", depth + 1)
        elif isinstance(value, (dict, list, deque)):
            if len(value) <= _MAX_ITEMS:
                self._seen.add(id(value))
                container = Container(owner, value, path)
                yield container
                yield from self._below(container, depth)
        elif not isinstance(value, _OPAQUE):
            attributes = getattr(value, "__dict__", None)
            package = kind.__module__.partition(".")[0]
            if isinstance(attributes, dict) and package not in _OPAQUE_PACKAGES:
                self._seen.add(id(value))
                container = Container(value, attributes, path, are_attributes=True)
                yield container
                yield from self._below(container, depth)

"""Find all places where a module keeps values: attributes, and lists, dicts, objects in them."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
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

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, *weakref.ProxyTypes})
_TREES = (tuple, dict, list, deque)
_OPAQUE_PACKAGES = frozenset({"builtins", "functools", "torch"})


@dataclass(frozen=True)
class Container:
    """A dict, list or deque that values can be replaced in.

    Attributes:
        values: the dict, list or deque itself.
        path: path of the container from the root module.
        are_attributes: whether the keys are names of attributes.
    """

    values: Any
    path: str
    are_attributes: bool = False

    def entries(self) -> list[tuple[Any, Any]]:
        """Return the present keys and values, without weak proxies, whose object may be gone."""
        items = self.values.items() if isinstance(self.values, dict) else enumerate(self.values)
        excluded = _TORCHS_NAMES if self.are_attributes else ()
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
    every: list[Container] = []
    modules: set[nn.Module] = set()
    seen: set[int] = set()
    waiting: deque[tuple[Any, str, int]] = deque([(module, name, 0)])
    while waiting:
        value, path, depth = waiting.popleft()
        if isinstance(value, nn.Module):
            parts = value.named_modules(modules, path)
            found = [
                Container(values, where, are_attributes=True)
                for where, part in parts
                for values in (part._parameters, part._buffers, vars(part))
            ]
        elif id(value) in seen:
            continue
        elif isinstance(value, _TREES):
            found = [Container(value, path)] if len(value) <= _MAX_ITEMS else []
        else:
            found = [Container(vars(value), path, are_attributes=True)]
        seen.add(id(value))
        every += [container for container in found if not isinstance(container.values, tuple)]
        for container in found if depth < _MAX_DEPTH else ():
            inner = [(key, value) for key, value in container.entries() if _may_hold(value)]
            waiting.extend((value, container.name(key), depth + 1) for key, value in inner)
    return every


def _may_hold(value: Any) -> bool:
    """Return whether to look for values in ``value``."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, (torch.Tensor, type)):
        return False
    has_attributes = isinstance(getattr(value, "__dict__", None), dict)
    package = kind.__module__.partition(".")[0]
    return isinstance(value, (nn.Module, *_TREES)) or (
        has_attributes and package not in _OPAQUE_PACKAGES
    )

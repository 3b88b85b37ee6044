"""Find all places where a module keeps values: attributes, and lists, dicts, objects in them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

_MAX_DEPTH = 4
"""Most lists, dicts, tuples and objects between a module and a value."""

_MAX_ITEMS = 4096
"""A longer list or dict holds data, not layers."""

_TORCHS_NAMES = frozenset(vars(nn.Module()))
"""Attributes in which torch keeps a module's parts, hooks and mode."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, *weakref.ProxyTypes})
_TREES = (tuple, dict, list, deque)
_OPAQUE_PACKAGES = frozenset({"builtins", "functools", "torch"})


class Entry(NamedTuple):
    """A value that can be replaced.

    Attributes:
        container: the dict, list or deque that has it.
        key: its key or index there.
        value: the value.
        name: the expression for it, as a user writes it.
    """

    container: Any
    key: Any
    value: Any
    name: str


def entries(module: nn.Module, name: str = "") -> Iterator[Entry]:
    """Yield the values in the attributes, lists, dicts and objects of a module and its parts.

    Modules that lie in plain attributes and lists are walked too. Objects of torch and of the
    standard library are not, and weak proxies are left out, since their object may be gone.

    Args:
        module: the root.
        name: name of the module, a prefix of names.
    """
    modules: set[nn.Module] = set()
    seen: set[int] = set()
    queue: deque[tuple[Any, str, int]] = deque([(module, name, 0)])
    while queue:
        holder, path, depth = queue.popleft()
        found: list[tuple[Any, str, bool]]  # containers, and whether their keys are attributes
        if isinstance(holder, nn.Module):
            found = [
                (container, where, True)
                for where, part in holder.named_modules(modules, path)
                for container in (part._parameters, part._buffers, vars(part))
            ]
        elif id(holder) in seen:
            continue
        elif isinstance(holder, _TREES):
            found = [(holder, path, False)] if len(holder) <= _MAX_ITEMS else []
        else:
            found = [(vars(holder), path, True)]
        seen.add(id(holder))
        for container, where, are_attributes in found:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in [*items]:
                if type(value) in weakref.ProxyTypes or (are_attributes and key in _TORCHS_NAMES):
                    continue
                text = f"{where}.{key}".lstrip(".") if are_attributes else f"{where}[{key!r}]"
                if not isinstance(container, tuple):
                    yield Entry(container, key, value, text)
                if depth < _MAX_DEPTH and _may_hold(value):
                    queue.append((value, text, depth + 1))


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

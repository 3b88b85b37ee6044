"""Compare at once the dicts in which torch's modules hold submodules, tensors and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

__all__ = ["HOOK_DICTS", "Holders", "are_same"]

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_contents = itemgetter("_modules", "_parameters", "_buffers")
_hooks = itemgetter(*HOOK_DICTS)


class Holders:
    """The present contents of modules' dicts.

    Args:
        modules: The modules.
        hooks: Further dicts of hooks, which nobody replaces.
    """

    def __init__(self, modules: Iterable[nn.Module], hooks: Iterable[dict[Any, Any]]) -> None:
        self._modules = [*modules]
        self._attributes = [*map(vars, self._modules)]
        self._dicts = self._dicts_now()
        of_hooks = [*chain.from_iterable(map(_hooks, self._attributes)), *hooks]
        contents = [*chain.from_iterable(map(_contents, self._attributes))]
        self._without_hooks = [own for own in of_hooks if not own]
        self._empty = [own for own in contents if not own]
        self._filled = [own for own in (*contents, *of_hooks) if own]
        self._values = self._values_now()

    def are_unchanged(self, *, may_have_new_hooks: bool) -> bool:
        """Return whether the dicts hold the same objects in the same order.

        Args:
            may_have_new_hooks: Whether to look at dicts of hooks that were empty.
        """
        return not (
            any(self._empty)
            or (may_have_new_hooks and any(self._without_hooks))
            or not are_same(self._values_now(), self._values)
        )

    def are_in_use(self) -> bool:
        """Return whether the modules still have these dicts, and their ``__dict__``."""
        return are_same([*map(vars, self._modules)], self._attributes) and are_same(
            self._dicts_now(), self._dicts
        )

    def replaced_attributes(self) -> list[nn.Module]:
        """Return the modules whose ``__dict__`` was replaced."""
        pairs = zip(self._modules, self._attributes, strict=True)
        return [module for module, own in pairs if vars(module) is not own]

    def _dicts_now(self) -> list[dict[Any, Any]]:
        every = chain(map(_contents, self._attributes), map(_hooks, self._attributes))
        return [*chain.from_iterable(every)]

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._filled))]


def are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(then) and all(map(is_, now, then))

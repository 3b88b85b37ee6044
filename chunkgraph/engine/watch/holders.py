"""Compare at once the dicts in which torch's modules hold submodules, tensors and hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

__all__ = ["HOOK_DICTS", "Holders", "are_same"]

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_dicts = itemgetter("_modules", "_parameters", "_buffers", *HOOK_DICTS)


class Holders:
    """The present contents of modules' dicts.

    Args:
        modules: The modules.
        others: Further dicts, which nobody replaces.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[dict[Any, Any]] = ()) -> None:
        self._modules = [*modules]
        self._attributes = [*map(vars, self._modules)]
        self._dicts = self._dicts_now()
        dicts = [*self._dicts, *others]
        self._empty = [own for own in dicts if not own]
        self._filled = [own for own in dicts if own]
        self._values = self._values_now()

    def are_unchanged(self) -> bool:
        """Return whether the dicts hold the same objects in the same order."""
        return not any(self._empty) and are_same(self._values_now(), self._values)

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
        return [*chain.from_iterable(map(_dicts, self._attributes))]

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._filled))]


def are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(then) and all(map(is_, now, then))

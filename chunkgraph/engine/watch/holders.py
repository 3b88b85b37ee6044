"""Compare at once the dicts in which torch's modules hold submodules, tensors and hooks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

__all__ = ["HOOK_DICTS", "Holders", "are_same"]

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_dicts = itemgetter("_modules", "_parameters", "_buffers", *HOOK_DICTS)


class Holders:
    """The present contents of modules' dicts.

    Most of the dicts are empty, so only the others are compared one by one.

    Args:
        attributes: ``vars()`` of each module.
    """

    def __init__(self, attributes: Sequence[dict[str, Any]]) -> None:
        self._attributes = attributes
        self._of_modules = self._dicts_now()
        self._dicts = [*chain.from_iterable(self._of_modules)]
        self._empty = [held for held in self._dicts if not held]
        self._filled = [held for held in self._dicts if held]
        self._values = self._values_now()

    def are_unchanged(self) -> bool:
        """Return whether the dicts hold the same objects.

        A replaced dict with equal contents is not noticed; see `are_same_dicts`.
        """
        if any(self._empty) or not are_same(self._values_now(), self._values):
            return False
        try:
            return self._dicts_now() == self._of_modules  # three times as fast as `is`
        except RuntimeError:  # comparing different tensors gives no single bool
            return False

    def are_same_dicts(self) -> bool:
        """Return whether the modules hold the same dicts."""
        return are_same([*chain.from_iterable(self._dicts_now())], self._dicts)

    def _dicts_now(self) -> list[tuple[dict[Any, Any], ...]]:
        return [*map(_dicts, self._attributes)]

    def _values_now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._filled))]


def are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(then) and all(map(is_, now, then))

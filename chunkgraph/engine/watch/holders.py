"""Compare at once the dicts in which torch's modules hold submodules and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

__all__ = ["HOOK_DICTS", "Holders", "are_same"]

HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_dicts = itemgetter("_modules", "_parameters", "_buffers")


class Holders:
    """The present contents of modules' dicts.

    Args:
        attributes: The ``vars()`` of each module.
    """

    def __init__(self, attributes: Sequence[dict[str, Any]]) -> None:
        self._attributes = attributes
        self._values = self._values_now()

    def are_unchanged(self) -> bool:
        """Return whether the modules hold the same objects in the same order."""
        return are_same(self._values_now(), self._values)

    def _values_now(self) -> list[Any]:
        dicts = chain.from_iterable(map(_dicts, self._attributes))
        return [*chain.from_iterable(map(dict.values, filter(None, dicts)))]


def are_same(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(now) == len(then) and all(map(is_, now, then))

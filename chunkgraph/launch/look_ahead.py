"""Looking ahead in Megatron's data iterators, below the layer that plays microbatches again."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = ["ReadAhead", "look_ahead", "num_microbatches_at"]


class ReadAhead:
    """An iterator whose next items can be seen before they are read.

    Args:
        iterator: read when something is looked at or read that was not looked at before. An error
            of its own comes up where the item is read, not where it is looked at.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: deque[Any] = deque()
        self._error: Exception | None = None  # behind those

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._seen:
            return self._seen.popleft()
        if self._error is not None:
            raise self._error
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        # Whoever asks the iterator below for more than items, finds it.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def first(self, num: int) -> list[Any] | None:
        """The next items, which stay to be read; None where there are fewer."""
        while len(self._seen) < num and self._error is None:
            try:
                self._seen.append(next(self._iterator))
            except StopIteration:
                return None
            except Exception as error:  # noqa: BLE001
                self._error = error
        return list(islice(self._seen, num)) if len(self._seen) >= num else None


def look_ahead(iterator: Any) -> ReadAhead | None:
    """What can be looked at of one of Megatron's training iterators; None of any other.

    What was looked at is read from the iterator as before, by whoever reads it, and is played again
    as before where Megatron runs a step a second time: its `RerunDataIterator` keeps what it hands
    out, and the look goes to the iterator below. One that saves where it stands is left alone: what
    it saves would be behind what was looked at.
    """
    kind = import_megatron("megatron.core.rerun_state_machine").RerunDataIterator
    if type(iterator) is not kind or not hasattr(iterator, "iterable"):
        return None
    below = iterator.iterable
    if isinstance(below, ReadAhead):
        return below
    if any(hasattr(below, name) for name in ("save_state", "state_dict")):
        return None
    iterator.iterable = made = ReadAhead(below)
    return made


def num_microbatches_at(consumed_samples: int) -> int | None:
    """Microbatches of a step that begins after so many samples; None where nobody counts them.

    Megatron's own count stays as it is.
    """
    (calculator,) = private_names(
        "megatron.core.num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    )
    if calculator is None:
        return None
    then = copy.copy(calculator)
    then.update(consumed_samples, consistency_check=False)
    return int(then.get())

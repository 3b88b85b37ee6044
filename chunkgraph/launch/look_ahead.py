"""Look ahead in Megatron's data iterators, below the layer that replays microbatches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from chunkgraph.megatron.core.access import import_megatron, private_names

__all__ = ["ReadAhead", "look_ahead", "num_microbatches_at"]


class ReadAhead:
    """An iterator whose next items can be inspected before they are read.

    Args:
        iterator: The underlying iterator, read on demand. An error that it raises surfaces when
            the item is read, not when it is inspected.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._seen: deque[Any] = deque()
        self._error: Exception | None = None  # raised after the items in _seen

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Any:
        if self._seen:
            return self._seen.popleft()
        if self._error is not None:
            raise self._error
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        # Forward all other public attributes to the underlying iterator.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def first(self, num: int) -> list[Any] | None:
        """Return the next items without consuming them; None if there are fewer."""
        while len(self._seen) < num and self._error is None:
            try:
                self._seen.append(next(self._iterator))
            except StopIteration:
                return None
            except Exception as error:  # noqa: BLE001
                self._error = error
        return list(islice(self._seen, num)) if len(self._seen) >= num else None


def look_ahead(iterator: Any) -> ReadAhead | None:
    """Return a look-ahead below one of Megatron's training iterators; None for other iterators.

    Readers of the iterator still get the inspected items, and Megatron can still replay them if it
    runs a step a second time: its `RerunDataIterator` stores the items that it returns, and the
    look-ahead replaces the iterator below it. An iterator that saves its position is left alone:
    the saved position would include inspected items.
    """
    kind = import_megatron("megatron.core.rerun_state_machine").RerunDataIterator
    if type(iterator) is not kind or not hasattr(iterator, "iterable"):
        return None
    wrapped = iterator.iterable
    if isinstance(wrapped, ReadAhead):
        return wrapped
    if any(hasattr(wrapped, name) for name in ("save_state", "state_dict")):
        return None
    iterator.iterable = ahead = ReadAhead(wrapped)
    return ahead


def num_microbatches_at(consumed_samples: int) -> int | None:
    """Return the number of microbatches of a step that begins after ``consumed_samples``.

    Return None if Megatron has no calculator for it. Megatron's own count does not change.
    """
    (calculator,) = private_names(
        "megatron.core.num_microbatches_calculator", "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    )
    if calculator is None:
        return None
    future = copy.copy(calculator)
    future.update(consumed_samples, consistency_check=False)
    return int(future.get())

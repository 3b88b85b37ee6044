"""Hold tensors that a forward reads from attributes, globals or closures, and notice replaced ones.

A graph remembers their addresses: it would read freed memory, or the old value. Parameters, buffers
and arguments are known otherwise.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef as WeakTensor
from torch.utils.weak import WeakIdKeyDictionary

from chunkgraph.engine.capture.preserved import put_back
from chunkgraph.engine.module_tree import Container
from chunkgraph.engine.signature import flatten_call
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import InputWatch, storage_address

__all__ = ["OutsideTensors"]

_Place = tuple[Container, Any, Any]
"""A container, a key in it, and its value."""


class OutsideTensors:
    """The tensors outside of a chunk's arguments that its forward reads.

    Args:
        label: Label of the chunk.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._inputs: Any = WeakIdKeyDictionary()
        self._places: list[_Place] = []
        self._aliases: list[torch.Tensor] = []
        self._owned: list[WeakTensor] = []
        self._written: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def is_written(self) -> bool:
        """Return whether the forward writes memory that existed before it."""
        return bool(self._written)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the forward writes."""
        return tuple(t for t in self._aliases if storage_address(t) in self._written)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore tensors that the forward writes in this block, on exit."""
        self._saved = {}
        try:
            yield
        finally:
            saved, self._saved = self._saved, None
            put_back(saved.values())

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward with a record of the tensors that its operators read."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            arguments = flatten_call(args, kwargs).tensors
            with InputWatch(self._inputs, self._before_write, arguments):
                return forward(*args, **kwargs)

        return watched

    def _before_write(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        self._written.add(address)
        if self._saved is not None and address not in self._saved and storage.nbytes():
            with _disable_current_modes():
                memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                self._saved[address] = (memory, memory.clone())

    def hold(
        self, containers: Iterable[Container], is_known: Callable[[torch.Tensor], bool]
    ) -> None:
        """Hold the memory of the recorded tensors, so that graphs never read freed memory.

        Args:
            containers: The places where the chunk's module keeps values.
            is_known: Returns whether graphs or the model own a tensor.
        """
        if _alive(self._inputs):
            gc.collect()  # cycles of the session are no owners
        tensors = [*itertools.filterfalse(is_known, _alive(self._inputs))]
        self._inputs = WeakIdKeyDictionary()
        self._aliases = [t.detach() for t in tensors]
        read, in_places = {*map(id, tensors)}, set()
        every = [(c, key, value) for c in containers for key, value in c.entries()]
        holders = {id(value): (c, key, value) for c, key, value in every}
        for container, key, value in every:
            items = value if isinstance(value, tuple) else (value,)
            if ids := read.intersection(map(id, items)):
                in_places |= ids
                self._places += [(container, key, value), *_above(container, holders)]
        self._owned = [WeakTensor(t) for t in tensors if id(t) not in in_places]
        del tensors
        self._owned = [ref for ref in self._owned if not _is_dropped(ref)]

    def check(self) -> None:
        """Notice tensors that were replaced or dropped.

        Raises:
            ReplayMismatchError: There is one; the message names it.
        """
        if not self._aliases:
            return
        changed = [c.name(key) for c, key, value in self._places if not _holds(c, key, value)]
        if num_dropped := sum(map(_is_dropped, self._owned)):
            changed.append(f"{num_dropped} tensors outside of the module")
        if changed:
            names = ", ".join(dict.fromkeys(changed))
            raise ReplayMismatchError(
                f"{self._label}: {names} was replaced or dropped after capture, and replays would "
                "read the captured one. Update it in place (copy_), or release the graphs and "
                "capture again."
            )


def _alive(inputs: Any) -> list[torch.Tensor]:
    tensors = [ref() for ref in inputs.keyrefs()]
    return [tensor for tensor in tensors if tensor is not None]


def _above(container: Container, holders: Mapping[int, _Place]) -> Iterator[_Place]:
    """Yield the places of the list, dict or object itself, and of those around it."""
    seen: set[int] = set()
    while True:
        own = id(container.owner if container.are_attributes else container.values)
        if own not in holders or own in seen:
            return
        seen.add(own)
        yield holders[own]
        container = holders[own][0]


def _holds(container: Container, key: Any, value: Any) -> bool:
    try:
        return container.values[key] is value
    except (KeyError, IndexError):
        return False


def _is_dropped(reference: WeakTensor) -> bool:
    """Return whether no Python object refers to the tensor any more."""
    tensors = [reference()]
    if tensors[0] is None:
        return True
    (count,) = map(sys.getrefcount, tensors)
    # All owners in C++, such as nodes of autograd, count as one reference.
    return count - (tensors[0]._use_count() > 1) <= _SOLE_REFERENCES


_SOLE_REFERENCES = next(map(sys.getrefcount, [torch.zeros(1, device="cpu")]))

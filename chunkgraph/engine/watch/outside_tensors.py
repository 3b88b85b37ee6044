"""Hold tensors that a forward reads from attributes, globals or closures, and notice replaced ones.

A graph remembers their addresses: it would read freed memory, or the old value. Parameters, buffers
and arguments are known otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from chunkgraph.engine.capture.preserved import put_back
from chunkgraph.engine.module_tree import Container
from chunkgraph.errors import ReplayMismatchError
from chunkgraph.graphs import InputWatch, storage_address

__all__ = ["OutsideTensors"]


class OutsideTensors:
    """The tensors outside of a chunk's arguments that its forward reads.

    Args:
        label: Label of the chunk.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._inputs: Any = WeakIdKeyDictionary()
        self._places: list[tuple[Container, Any, Any]] = []
        self._held: list[torch.Tensor] = []
        self._owned: list[torch.Tensor] = []
        self._written: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """Return the held tensors that the forward writes."""
        return tuple(t for t in self._held if storage_address(t) in self._written)

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
            with InputWatch(self._inputs, self._before_write):
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
        """Hold the recorded tensors from now on, so that graphs never read freed memory.

        Args:
            containers: The places where the chunk's module keeps values.
            is_known: Returns whether graphs or the model own a tensor.
        """
        tensors = (ref() for ref in self._inputs.keyrefs())
        self._held = [t for t in tensors if t is not None and not is_known(t)]
        self._inputs = WeakIdKeyDictionary()
        held, in_places = {*map(id, self._held)}, set()
        for container in containers:
            for key, value in container.entries():
                items = value if isinstance(value, tuple) else (value,)
                if ids := held.intersection(map(id, items)):
                    in_places |= ids
                    self._places.append((container, key, value))
        self._owned = [
            tensor
            for tensor, num_owners in zip(self._held, _num_owners(self._held), strict=True)
            if num_owners > 1 and id(tensor) not in in_places
        ]

    def check(self) -> None:
        """Notice tensors that were replaced or dropped.

        Raises:
            ReplayMismatchError: There is one; the message names it.
        """
        if not self._held:
            return
        changed = [c.name(key) for c, key, value in self._places if not _holds(c, key, value)]
        # `_held` and `_owned` are the only owners of a tensor that the program dropped.
        changed += [
            f"a tensor {tuple(tensor.shape)} {tensor.dtype} outside of the module"
            for tensor, num_owners in zip(self._owned, _num_owners(self._owned), strict=True)
            if num_owners <= 2
        ]
        if changed:
            raise ReplayMismatchError(
                f"{self._label}: {', '.join(changed)} was replaced or dropped after capture, and "
                "replays would read the captured one. Update it in place (copy_), or release the "
                "graphs and capture again."
            )


def _holds(container: Container, key: Any, value: Any) -> bool:
    try:
        return container.values[key] is value
    except (KeyError, IndexError):
        return False


def _num_owners(tensors: list[torch.Tensor]) -> list[int]:
    """Return how many references of Python each tensor has, that of the list included."""
    counts = [*map(sys.getrefcount, tensors)]
    # All owners in C++, such as nodes of autograd, count as one reference.
    shared = [tensor._use_count() > 1 for tensor in tensors]  # type: ignore[attr-defined]
    return [count - _NUM_OF_CALL - more for count, more in zip(counts, shared, strict=True)]


_NUM_OF_CALL = next(map(sys.getrefcount, [torch.zeros(1, device="cpu")])) - 1

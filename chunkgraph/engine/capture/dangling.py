"""No tensor of a pool outlives the capture unseen.

Whatever a capture leaves in Python lies in the memory of one graph: other graphs may overwrite it,
and it has no value before the first replay. So what modules keep is restored after each capture
(`Bookkeeping`), and a session fails if anything else in the process still refers to its memory
(`refuse_dangling`). What eager warmup passes leave stays, outside of pools (`move_out`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from chunkgraph.engine.capture.restore import restoring_parts
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, Pool, storage_address

_DEPTH = 2
"""Most objects, dicts and lists between a module and an entry that is restored."""

_OPAQUE = (type, torch.Tensor, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
"""Their attributes are no bookkeeping."""

_looking = threading.RLock()
"""Held while looking at tensors: temporary references of another thread would be reported."""


class Bookkeeping:
    """What modules keep: attributes, buffers, and entries of objects, dicts and lists in these.

    Args:
        chunk: the chunk of the modules; without a module, nothing is restored.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        level: list[Any] = [vars(m) for m in chunk.module.modules()] if chunk.module else []
        found: dict[int, Any] = {}
        for _ in range(_DEPTH + 1):
            level = [own for own in level if id(own) not in found]
            found.update((id(own), own) for own in level)
            values = [v for own in level for v in (own.values() if isinstance(own, dict) else own)]
            level = [own for own in map(_container, values) if own is not None]
        self._containers = list(found.values())

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Restore, on exit, what the modules kept before the block.

        Raises:
            CaptureError: see `restoring_parts`.
        """
        before = [container.copy() for container in self._containers]
        try:
            with restoring_parts(self._chunk, ["_buffers"]):  # data parallelism may swap parameters
                yield
        finally:
            for own, entries in zip(self._containers, before, strict=True):
                if _ids(own) != _ids(entries):
                    own.clear()
                    own.update(entries) if isinstance(own, dict) else own.extend(entries)


def _container(value: Any) -> Any:
    """Return the dict, list or deque with the entries of a value; None if it has none."""
    if type(value) in weakref.ProxyTypes or isinstance(value, _OPAQUE):  # a proxy may be dead
        return None
    entries = value if isinstance(value, (list, deque, dict)) else getattr(value, "__dict__", None)
    return entries if isinstance(entries, (list, deque, dict)) else None


def _ids(container: Any) -> list[int]:
    """Return the ids of the entries of a dict, list or deque."""
    is_dict = isinstance(container, dict)
    return [*map(id, (*container, *container.values()) if is_dict else container)]


def refuse_dangling(label: str, pools: Sequence[Pool], slots: Iterable[Slot]) -> None:
    """Refuse tensors in ``pools``, and gradients there, that do not belong to a slot.

    Args:
        label: name of the rank or chunk in errors.
        pools: the pools of the session, which has ended.
        slots: the slots of the session.

    Raises:
        CaptureError: there are such tensors; the message says where.
    """
    known: set[int] = set()
    for slot in slots:
        known.update(map(id, (*slot.loaded, *slot.outputs.tensors, *slot.input_grads.tensors)))
    # Functions of subclasses are bypassed: an uninitialized parameter of any module refuses them.
    with _looking, torch._C.DisableTorchFunction():
        if not _dangling(pools, known):
            return
        gc.collect()
        if not (dangling := _dangling(pools, known)):
            return
        places = [f"{_keeper(t)}: {tuple(t.shape)} {t.dtype}" for t in dangling[:3]]
    raise CaptureError(
        f"{label}: {len(dangling)} tensors that the captured work created are still "
        f"referenced: {', '.join(places)}{', ...' * (len(dangling) > 3)}. They lie in the graphs' "
        "memory, which every replay overwrites. Return them from the forward as tensors, in "
        "tuples, lists or dicts; create caches before the capture, in an eager step; drop the rest."
    )


def move_out(pool: Pool) -> None:
    """Move what an eager pass has left in ``pool``, such as tables, to memory of its own."""
    if pool.live():  # perhaps what only cycles hold
        gc.collect()
    storages: dict[int, torch.UntypedStorage] = {}
    with _looking, torch._C.DisableTorchFunction(), torch.no_grad():
        for tensor in _dangling([pool], set()):
            copy = storages.setdefault(storage_address(tensor), tensor.untyped_storage().clone())
            tensor.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())


def _dangling(pools: Sequence[Pool], known: set[int]) -> list[torch.Tensor]:
    """Return the tensors in live blocks of pools, except those known by their ids."""
    live = AddressRanges(area for pool in pools for area in pool.live())
    if not live:  # as usual: a list of all objects would disturb other threads
        return []
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    for tensor in tuple(tensors):
        # A view whose base has changed since does not tell whether it is a leaf.
        with suppress(RuntimeError):
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                tensors.append(tensor.grad)
    every = {id(t): t for t in tensors if id(t) not in known}
    return [t for t in every.values() if _lies_in(live, pools, t)]


def _lies_in(live: AddressRanges, pools: Sequence[Pool], tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in live memory of pools and is no alias that a graph uses."""
    address = storage_address(tensor)
    place = bisect(live, address, key=lambda area: area.end)
    if place == len(live) or address < live[place].start:
        return False
    return not any(pool.is_alias(tensor.untyped_storage()) for pool in pools)


def _keeper(tensor: torch.Tensor) -> str:
    """Return the class and attribute that refer to a tensor."""
    keepers: list[Any] = gc.get_referrers(tensor)
    owners = [o for k in keepers if isinstance(k, dict) for o in gc.get_referrers(k)]
    for owner in (*keepers, *owners):
        attributes = getattr(owner, "__dict__", None)
        for name, value in attributes.items() if isinstance(attributes, dict) else ():
            if value is tensor:
                return f"{type(owner).__name__}.{name}"
    return "outside of the module"

"""No tensor of a pool outlives the capture unseen.

Whatever a capture leaves in Python lies in the memory of one graph: other graphs may overwrite it,
and it has no value before the first replay. So modules get back what they kept before each capture
(`Bookkeeping`), and a session fails if anything else in the process still refers to its memory
(`refuse_dangling`). What eager warmup passes leave stays.
"""

from __future__ import annotations

import bisect
import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Pool

__all__ = ["Bookkeeping", "refuse_dangling"]

_DEPTH = 2
"""Most objects, dicts and lists between a module and an entry that is put back."""

_OPAQUE = (type, torch.Tensor, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
"""Their attributes are no bookkeeping."""

_looking = threading.RLock()
"""Held while looking at tensors: temporary references of another thread would be reported."""


class Bookkeeping:
    """What modules keep: attributes, buffers, and entries of objects, dicts and lists in these.

    Args:
        chunk: the chunk of the modules; without a module, nothing is put back.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        level: list[Any] = [vars(m) for m in chunk.module.modules()] if chunk.module else []
        found: dict[int, Any] = {}
        for _ in range(_DEPTH + 1):
            level = [holder for holder in level if id(holder) not in found]
            found.update((id(holder), holder) for holder in level)
            values = [v for h in level for v in (h.values() if isinstance(h, dict) else h)]
            level = [holder for holder in map(_holder, values) if holder is not None]
        self._holders = list(found.values())

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Put back, on exit, what the modules kept before the block.

        Raises:
            CaptureError: the block replaced a buffer, which is state of the model.
        """
        before = [holder.copy() for holder in self._holders]
        buffers = self._buffers()
        try:
            yield
            now = self._buffers()
            if replaced := [name for name, b in buffers.items() if now.get(name) is not b]:
                raise CaptureError(
                    f"{self._chunk.label}: its forward replaces {', '.join(replaced)} by another "
                    "tensor, so every replay would start from the value of the capture. Update it "
                    "in place (add_, copy_), or keep it out of the chunk."
                )
        finally:
            for holder, entries in zip(self._holders, before, strict=True):
                if _ids(holder) != _ids(entries):
                    holder.clear()
                    holder.update(entries) if isinstance(holder, dict) else holder.extend(entries)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the present buffers by name, except caches."""
        module, caches = self._chunk.module, self._chunk.caches
        named = module.named_buffers(remove_duplicate=False) if module is not None else ()
        return {name: b for name, b in named if name.rpartition(".")[2] not in caches}


def _holder(value: Any) -> Any:
    """Return the dict, list or deque with the entries of a value; None if it has none."""
    if type(value) in weakref.ProxyTypes or isinstance(value, _OPAQUE):  # a proxy may be dead
        return None
    entries = value if isinstance(value, (list, deque, dict)) else getattr(value, "__dict__", None)
    return entries if isinstance(entries, (list, deque, dict)) else None


def _ids(holder: Any) -> list[int]:
    """Return the ids of the entries of a dict, list or deque."""
    return [*map(id, (*holder, *holder.values()) if isinstance(holder, dict) else holder)]


def refuse_dangling(label: str, pools: Sequence[Pool], slots: Iterable[Slot]) -> None:
    """Refuse tensors in ``pools``, and gradients there, that do not belong to a slot.

    Args:
        label: name of the rank or chunk in errors.
        pools: the pools of the session, which has ended.
        slots: the slots of the session.

    Raises:
        CaptureError: there are such tensors; the message says where.
    """
    tensors = (t for s in slots for t in (*s.inputs.tensors, *s.outputs.tensors, *_output_grads(s)))
    grads = (g for s in slots for g in s.input_grads.tensors if g is not None)
    known = {id(t) for t in (*tensors, *grads)}
    # Functions of subclasses are bypassed: an uninitialized parameter of any module refuses them.
    with _looking, torch._C.DisableTorchFunctionSubclass():
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


def _dangling(pools: Sequence[Pool], known: set[int]) -> list[torch.Tensor]:
    """Return the tensors in live blocks of pools, except those known by their ids."""
    ranges = sorted((r.start, r.end) for pool in pools for r in pool.live())
    if not ranges:  # as usual: a list of all objects would disturb other threads
        return []
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    for tensor in tuple(tensors):
        # A view whose base has changed since does not tell whether it is a leaf.
        with suppress(RuntimeError):
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                tensors.append(tensor.grad)
    every = {id(t): t for t in tensors if id(t) not in known}
    return [t for t in every.values() if _lies_in(ranges, pools, t)]


def _lies_in(
    ranges: Sequence[tuple[int, int]], pools: Sequence[Pool], tensor: torch.Tensor
) -> bool:
    """Return whether a tensor lies in sorted ranges of pools and is no alias that a graph uses."""
    try:
        storage = tensor.untyped_storage()
        # That of a compiler's tensor has no address.
        address = storage.data_ptr() if storage.device.type != "meta" else 0
    except (RuntimeError, NotImplementedError, ValueError):  # the tensor has no storage
        return False
    place = bisect.bisect_right(ranges, (address, sys.maxsize)) - 1
    if place < 0 or address >= ranges[place][1]:
        return False
    return not any(pool.is_alias(storage) for pool in pools)


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


def _output_grads(slot: Slot) -> tuple[torch.Tensor, ...]:
    return () if slot.output_grads is None else slot.output_grads.tensors

"""Find tensors left in the memory of graphs after a capture session, and lost gradients.

A tensor that lies in a pool after the session, and is not a slot's, is still referenced from
somewhere, and every replay would overwrite it. Python's garbage collector knows all tensors that a
program can read.
"""

from __future__ import annotations

import bisect
import gc
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import AddressRanges, Pool

__all__ = ["LeafGradients", "refuse_left_behind"]

_looking = threading.RLock()
"""Held while looking at tensors: temporary references of another thread would be reported."""


def refuse_left_behind(
    chunks: Sequence[Chunk], pools: Sequence[Pool], slots: Iterable[Slot]
) -> None:
    """Refuse tensors in ``pools`` that do not belong to a slot.

    Args:
        chunks: the chunks whose modules may hold them.
        pools: the pools of the session, which has ended.
        slots: the slots of the session.

    Raises:
        CaptureError: there are such tensors; the message names them.
    """
    slot_tensors = {id(t) for slot in slots for t in _tensors_of(slot)}
    if _left_tensors(pools, slot_tensors):
        gc.collect()
    if left := _left_tensors(pools, slot_tensors):
        names = _names(chunks, left)
        label = chunks[0].label if len(chunks) == 1 else chunks[0].label.split(" chunk")[0]
        raise CaptureError(
            f"{label}: {len(left)} tensors that the captured work created are still referenced: "
            f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}. They lie in the graphs' memory, "
            "which every replay overwrites. Return them from the forward as tensors, in tuples, "
            "lists or dicts; create caches before the capture, in an eager step; drop the rest."
        )


class LeafGradients:
    """The ``.grad`` of every leaf that exists when a session begins."""

    def __init__(self) -> None:
        with _looking:
            self._before = {
                id(leaf): (ref, None if leaf.grad is None else (id(leaf.grad), _version(leaf.grad)))
                for ref in _tensor_refs()
                if (leaf := _leaf(ref)) is not None
            }

    def refuse_lost(self, label: str, pools: Sequence[Pool], writes: AddressRanges | None) -> None:
        """Refuse gradients of unknown leaves after the session, and reset those in its pools.

        Args:
            label: the rank's label.
            pools: the pools of the session.
            writes: the addresses that its backwards write; None: unknown.

        Raises:
            CaptureError: the captured work computes gradients of a leaf that is neither an argument
                nor a parameter.
        """
        with _looking:
            lost = self._lost(pools, writes)
        if lost:
            shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in lost[:3])
            raise CaptureError(
                f"{label}: the captured work computes gradients of {len(lost)} tensors that are "
                f"neither arguments nor parameters of the chunk (shapes {shapes}), in a backward "
                "of recomputation; a replay would lose them. List them in Chunk.parameters and "
                "keep them in attributes of the module, or pass them as arguments to the "
                "checkpointed function."
            )

    def _lost(self, pools: Sequence[Pool], writes: AddressRanges | None) -> list[torch.Tensor]:
        lost: list[torch.Tensor] = []
        memory = _Memory(pools, live=False)
        for ref in _tensor_refs():
            leaf = _leaf(ref)
            if leaf is None or leaf.grad is None:
                continue
            if memory.holds(leaf.grad):
                leaf.grad = None
                lost.append(leaf)
                continue
            known, before = self._before.get(id(leaf), (None, None))
            if known is None or known() is not leaf:
                continue
            if before == (id(leaf.grad), _version(leaf.grad)):
                continue
            is_same = before is not None and before[0] == id(leaf.grad)
            if (is_same or before is None) and (writes is None or _at(leaf.grad) & writes):
                if before is None:  # a pass of the session made it, and the capture added to it
                    leaf.grad = None
                lost.append(leaf)
        return lost


class _Memory:
    """The memory of pools, to look up tensors in it.

    Args:
        pools: the pools.
        live: whether only blocks in use count.
    """

    def __init__(self, pools: Sequence[Pool], *, live: bool) -> None:
        self._pools = tuple(pools)
        ranges = [r for pool in pools for r in (pool.live() if live else pool.reserved())]
        self._ranges = sorted((r.start, r.end) for r in ranges)
        self._starts = [start for start, _ in self._ranges]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in this memory and is not an alias that a graph uses."""
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError, ValueError):  # the tensor has no storage
            return False
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._ranges[place][1]:
            return False
        return not any(pool.is_alias(storage) for pool in self._pools)


def _left_tensors(pools: Sequence[Pool], slot_tensors: set[int]) -> list[torch.Tensor]:
    """Return the tensors in live blocks of pools, except those of slots (by id)."""
    with _looking:
        memory = _Memory(pools, live=True)
        tensors = (ref() for ref in _tensor_refs())
        return [
            t for t in tensors if t is not None and id(t) not in slot_tensors and memory.holds(t)
        ]


def _tensor_refs() -> list[weakref.ref[torch.Tensor]]:
    """Return weak references to all tensors that Python knows of, as referrers of their class.

    A list of all objects would include objects that other threads are still constructing.
    """
    objects = gc.get_referrers(torch.Tensor, *_subclasses(torch.Tensor))
    return [weakref.ref(o) for o in objects if issubclass(type(o), torch.Tensor)]


def _subclasses(kind: Any) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _leaf(ref: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    tensor = ref()
    if tensor is None or not tensor.requires_grad or not tensor.is_leaf:
        return None
    return tensor


def _version(grad: torch.Tensor) -> int:
    return 0 if grad.is_inference() else grad._version


def _at(tensor: torch.Tensor) -> AddressRanges:
    start = tensor.data_ptr()
    return AddressRanges([(start, start + 1)])


def _tensors_of(slot: Slot) -> Iterator[torch.Tensor]:
    for tensor in (*slot.inputs, *slot.output_tensors, *slot.output_grads, *slot.input_grads):
        if tensor is not None:
            yield tensor


def _names(chunks: Sequence[Chunk], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the place, shape and dtype of each tensor."""
    paths: dict[int, str] = {}
    for chunk in chunks:
        for container in containers(chunk.module, chunk.module_name) if chunk.module else ():
            for key, value in container.entries():
                for item in value if isinstance(value, tuple) else (value,):
                    paths.setdefault(id(item), container.name(key))
    return [f"{paths.get(id(t)) or _keeper(t)}: {tuple(t.shape)} {t.dtype}" for t in tensors]


def _keeper(tensor: torch.Tensor) -> str:
    """Return the class and attribute that refer to a tensor outside of the modules."""
    keepers: list[Any] = gc.get_referrers(tensor)
    owners = [o for k in keepers if isinstance(k, dict) for o in gc.get_referrers(k)]
    for owner in (*keepers, *owners):
        attributes = getattr(owner, "__dict__", None)
        for name, value in attributes.items() if isinstance(attributes, dict) else ():
            if value is tensor:
                return f"{type(owner).__name__}.{name}"
    return "outside of the module"

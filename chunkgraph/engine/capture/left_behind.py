"""Find tensors left in the memory of graphs after a capture session, and refuse lost gradients.

A tensor that lies in a pool after the session, and is not a slot's, is still referenced from
somewhere, and every replay would overwrite it. Python's garbage collector knows all tensors that a
program can read.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.module_tree import containers
from chunkgraph.engine.pool_memory import PoolMemory
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.watch.eager_gradients import LeafHook
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import Pool

__all__ = ["refuse_left_behind", "unknown_leaves_refused"]

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


@contextmanager
def unknown_leaves_refused(chunks: Sequence[Chunk]) -> Iterator[None]:
    """Refuse gradients of leaves that existed before this block and that no chunk declares.

    Arguments are captured as copies, and parameters of a module as aliases, so neither exists yet.

    Args:
        chunks: the chunks of the session.

    Raises:
        CaptureError: a backward computes such a gradient, which it then does not add.
    """
    declared = {id(p) for chunk in chunks if chunk.module is None for p in chunk.parameters}
    thread = threading.get_ident()

    def refuse(leaf: torch.Tensor) -> None:
        # Autograd runs a backward on the CPU in the calling thread.
        if leaf.is_cpu and threading.get_ident() != thread:
            return
        raise CaptureError(
            f"{chunks[0].label}: the captured work computes a gradient of a tensor that is neither "
            f"an argument nor a parameter of the chunk ({', '.join(_names(chunks, [leaf]))}); a "
            "replay would lose it. List it in Chunk.parameters and keep it in an attribute of the "
            "module, or pass it as an argument, also to a function that is checkpointed."
        )

    handles = _hook_leaves(refuse, declared)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_leaves(
    function: Callable[[torch.Tensor], None], declared: set[int]
) -> list[RemovableHandle]:
    """Call ``function`` before a gradient of any leaf not in ``declared`` (by id) is added.

    No leaf is referenced afterwards: a session in another thread would report it.
    Functions of subclasses are bypassed: an uninitialized parameter of any module refuses them.
    """
    handles = []
    with _looking, torch._C.DisableTorchFunctionSubclass():
        for ref in _tensor_refs():
            leaf = ref()
            if leaf is None or id(leaf) in declared or not _is_leaf(leaf):
                continue
            handles.append(leaf.register_hook(LeafHook(function, leaf)))
        leaf = None
    return handles


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether gradients arrive at a tensor; not at a view whose base has changed since."""
    with suppress(RuntimeError):
        return tensor.requires_grad and tensor.is_leaf
    return False


def _left_tensors(pools: Sequence[Pool], slot_tensors: set[int]) -> list[torch.Tensor]:
    """Return the tensors in live blocks of pools, except those of slots (by id)."""
    with _looking, torch._C.DisableTorchFunctionSubclass():
        memory = PoolMemory(pools)
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

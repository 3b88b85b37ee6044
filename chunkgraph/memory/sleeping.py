"""Memory of parameters, gradients or other state that sleeps, and wakes at the same addresses."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, Self
from weakref import WeakSet

import torch

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.graphs import AddressRanges, CUDABackend, GraphBackend, RecorderBackend, tensor_at
from chunkgraph.graphs.operators import storage_address
from chunkgraph.memory import pools

_memories: WeakSet[sleeping_memory] = WeakSet()
_asleep: set[sleeping_memory] = set()


class _Blocks(threading.local):
    """The memory of the ``with`` blocks that a thread is in, of which the innermost serves."""

    def __init__(self) -> None:
        self.entered: list[sleeping_memory] = []
        self._serving = ExitStack()

    def serve(self) -> None:
        """Let the innermost memory serve, and no other one."""
        self._serving.close()
        if self.entered:
            self._serving.enter_context(self.entered[-1].pool.serving_this_thread())


_blocks = _Blocks()


class sleeping_memory:  # noqa: N801 - like torch.no_grad
    """Serve all that this thread allocates in a ``with`` block. Tensors may outlive this object.

    Args:
        label: Name in errors.
        backup: ``host`` keeps the contents in pinned memory of the host meanwhile. None: they are
            undefined after `wake`, and the caller fills them.
        backend: Makes the memory. Default: CUDA's on the current device, else the CPU recorder.

    Raises:
        ConfigError: ``backup`` is unknown, or memory of this process must not sleep
            (`chunkgraph.graphs.arena`).

    Attributes:
        label: Name in errors.
        pool: The memory.
    """

    def __init__(
        self,
        label: str,
        *,
        backup: Literal["host"] | None = None,
        backend: GraphBackend | None = None,
    ) -> None:
        if backup not in (None, "host"):
            raise ConfigError(f"backup is {shown(backup)}; it must be 'host' or None.")
        make = CUDABackend if torch.cuda.is_available() else RecorderBackend
        self._backend = make(can_sleep=True) if backend is None else backend
        self.label, self.pool = label, self._backend.new_pool(label)
        self._copier, self._backup = self._backend.new_copier(), backup
        self._live = AddressRanges()  # when it slept last
        self._blocks: list[torch.Tensor] = []
        self._kept = self._copier.host_memory(0)  # what is in the blocks
        _memories.add(self)

    def __enter__(self) -> Self:
        if self.is_asleep:
            raise SlotError(f"Memory {self.label} sleeps. Call wake() before allocating in it.")
        _blocks.entered.append(self)
        _blocks.serve()
        return self

    def __exit__(self, *_: object) -> None:
        _blocks.entered.pop()
        _blocks.serve()

    @property
    def is_asleep(self) -> bool:
        """Return whether the memory was given back."""
        return self.pool.is_asleep

    def sleep(self) -> None:
        """Give the memory back, after all work of the device. Nothing may use it until `wake`.

        Raises:
            SlotError: this thread is in a ``with`` block of this memory.
        """
        if self.is_asleep:
            return
        if self in _blocks.entered:
            raise SlotError(f"Memory {self.label} cannot sleep inside its with block. End it.")
        self._backend.release_cached_memory()  # waits for the device
        if self._backup is not None:
            if (live := self.pool.live()) != self._live:
                device = self.pool.device
                with torch.inference_mode(False):  # wake() may be called outside of it
                    self._blocks = [tensor_at(r.start, r.end - r.start, device) for r in live]
                    self._kept = self._copier.host_memory(sum(b.numel() for b in self._blocks))
                self._live = live
            self._copy(to_host=True)
        self.pool.sleep()
        _asleep.add(self)

    def wake(self) -> None:
        """Get memory at the same addresses, with the contents of the backup, if there is one.

        Raises:
            torch.OutOfMemoryError: Too little is free; the memory sleeps on.
        """
        if self.is_asleep:
            self._backend.release_cached_memory()
            pools.wake([self.pool], self._backend, self.label)
            self._copy(to_host=False)
            _asleep.discard(self)

    def follow(self, owner: Any, load: str, offload: str) -> None:
        """Hold what a framework loads, and sleep once it has offloaded all of that.

        Its parameters and gradients then come back at the same addresses. ``load`` and ``offload``
        name functions of ``owner``, such as a module or class, that allocate and free the memory.
        """
        loads, offloads = getattr(owner, load), getattr(owner, offload)

        @functools.wraps(loads)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            self.wake()
            with self:
                return loads(*args, **kwargs)

        @functools.wraps(offloads)
        def offloaded(*args: Any, **kwargs: Any) -> Any:
            result = offloads(*args, **kwargs)
            if not self.pool.live():
                self.sleep()
            return result

        setattr(owner, load, loaded)
        setattr(owner, offload, offloaded)

    def _copy(self, *, to_host: bool) -> None:
        """Copy between the blocks and the host, and wait."""
        self._copier.wait(self._copier.copy(self._blocks, self._kept, [], to_host=to_host))
        self._backend.synchronize()


def memory_holding(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return the sleeping memory that holds ``tensor``, to enter and allocate in.

    Returns:
        A context that does nothing if no such memory holds it.
    """
    for memory in _memories:
        if any(r.start <= tensor.data_ptr() < r.end for r in memory.pool.reserved()):
            return memory
    return nullcontext()


def refuse_asleep(label: str, tensors: Iterable[torch.Tensor], *, with_gradients: bool) -> None:
    """Refuse a step of ``label``, a chunk or optimizer, that would use memory that sleeps.

    Raises:
        SlotError: one of ``tensors``, or a gradient that the step uses, lies in it.
    """
    _asleep.difference_update([m for m in _asleep if not m.pool.live()])  # nobody may have them
    every = [*tensors] if _asleep else []
    for memory in _asleep:
        reserved = memory.pool.reserved()
        for p in every:
            grads = (p.grad, getattr(p, "main_grad", None)) if with_gradients else ()
            used = [storage_address(t) for t in (p, *grads) if t is not None]
            if any(area.start <= a < area.end for area in reserved for a in used):
                raise SlotError(
                    f"A step of {label} began while memory {memory.label} sleeps, which holds a "
                    f"parameter, buffer or gradient of shape {tuple(p.shape)}. Call its wake() "
                    "before, on every rank."
                )

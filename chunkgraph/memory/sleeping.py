"""Memory of parameters, gradients or other state that sleeps, and wakes at the same addresses.

::

    with chunkgraph.sleeping_memory("weights", backup="host") as weights:
        model = build_model()
    ...
    weights.sleep()  # between two steps
    weights.wake()
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Literal, Self

import torch

from chunkgraph._text import shown
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.graphs import AddressRange, CUDABackend, GraphBackend, RecorderBackend, tensor_at
from chunkgraph.memory import pools

Backup = Literal["host"] | None

_asleep: set[SleepingMemory] = set()


def sleeping_memory(
    label: str, *, backup: Backup = None, device: torch.device | None = None
) -> SleepingMemory:
    """Return memory for all that this thread allocates on a device in a ``with`` block of it.

    Args:
        label: Its name in errors.
        backup: ``host`` keeps the contents in pinned memory of the host meanwhile. None: they are
            undefined after `SleepingMemory.wake`, and the caller fills them.
        device: Default: the current CUDA device; the CPU if there is none.

    Raises:
        ConfigError: ``backup`` is unknown, or memory of this process must not sleep
            (`chunkgraph.graphs.arena`).
    """
    if backup not in (None, "host"):
        raise ConfigError(f"backup is {shown(backup)}; it must be 'host' or None.")
    if torch.cuda.is_available() if device is None else device.type == "cuda":
        return SleepingMemory(label, CUDABackend(device, can_sleep=True), backup)
    return SleepingMemory(label, RecorderBackend(can_sleep=True), backup)


class SleepingMemory:
    """Memory that can be given back; see `sleeping_memory`. Its tensors may outlive this object.

    Args:
        label: Its name in errors.
        backend: Makes its pool.
        backup: See `sleeping_memory`.

    Attributes:
        label: Its name in errors.
        pool: The memory.
    """

    def __init__(self, label: str, backend: GraphBackend, backup: Backup) -> None:
        self.label, self.pool = label, backend.new_pool(label)
        self._backend, self._copier, self._backup = backend, backend.new_copier(), backup
        self._blocks: list[AddressRange] = []  # with a backup
        self._host: torch.Tensor | None = None
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._entered.enter_context(self.pool.serving_this_thread())
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    @property
    def is_asleep(self) -> bool:
        """Return whether the memory was given back."""
        return self.pool.is_asleep

    def sleep(self) -> None:
        """Give the memory back, after all work of the device. Nothing may use it until `wake`."""
        if self.is_asleep:
            return
        self._backend.release_cached_memory()  # waits for the device
        if self._backup is not None:
            self._blocks = list(self.pool.live())
            num_bytes = sum(end - start for start, end in self._blocks)
            if self._blocks and (self._host is None or self._host.numel() != num_bytes):
                self._host = self._copier.host_memory(num_bytes)
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

    def _copy(self, *, to_host: bool) -> None:
        """Copy all blocks, and wait."""
        moves, begin = [], 0
        for start, end in self._blocks:
            assert self._host is not None
            block = tensor_at(start, end - start, self.pool.device)
            on_host = self._host[begin : begin + block.numel()]
            moves.append((on_host, block) if to_host else (block, on_host))
            begin += block.numel()
        self._copier.wait(self._copier.copy(moves, [], to_host=to_host))
        self._backend.synchronize()


def refuse_asleep(parameters: Iterable[torch.Tensor], what: str, *, with_gradients: bool) -> None:
    """Refuse a step that would use memory that sleeps.

    Args:
        parameters: The parameters that the step uses.
        what: What would use them, in words.
        with_gradients: Whether it uses their gradients too.

    Raises:
        SlotError: Some of it sleeps.
    """
    for memory in _asleep:
        reserved = memory.pool.reserved()
        for p in parameters:
            grads = (p.grad, getattr(p, "main_grad", None)) if with_gradients else ()
            used = [t.data_ptr() for t in (p, *grads) if t is not None]
            if reserved and any(area.start <= a < area.end for area in reserved for a in used):
                raise SlotError(
                    f"{what} while memory {memory.label} sleeps, which holds a parameter or "
                    f"gradient of shape {tuple(p.shape)}. Call its wake() before, on every rank."
                )

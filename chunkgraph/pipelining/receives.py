"""Receive buffers that exist only from a receive to its use.

Torch before 2.15 keeps a buffer for every microbatch, and on it the input gradient of the last
step. Here a tensor on the meta device takes the place of a buffer that is not in use. Torch 2.15
allocates and drops buffers itself; it has None there.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from chunkgraph.engine.gradients import use_count

META = torch.device("meta")


class ReceiveMemory:
    """Memory of receive buffers, which new receives use again as soon as nothing refers to it.

    NCCL records its stream on every buffer, so the CUDA allocator reuses a freed one only after the
    device has passed all transfers posted until then, and the host may be a step ahead. A receive
    need not wait for the device: its stream waits for the one that it is posted on. So this one
    must have waited for the last receive into the buffer, and run everything that reads it.
    """

    def __init__(self) -> None:
        self._storages: dict[tuple[torch.device, int], list[torch.UntypedStorage]]
        self._storages = defaultdict(list)

    @property
    def num_buffers(self) -> int:
        """Return the number of buffers, in use or not."""
        return sum(map(len, self._storages.values()))

    def empty_like(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a new tensor like ``buffer`` on memory that nothing refers to."""
        num_bytes = buffer.untyped_storage().nbytes()
        storages = self._storages[device, num_bytes]
        if _ALONE not in (references := _references(storages)):
            storages.append(torch.UntypedStorage(num_bytes, device=device))
            references.append(_ALONE)
        storage = storages[references.index(_ALONE)]
        tensor = torch.empty(0, dtype=buffer.dtype, device=device)
        tensor.set_(storage, 0, buffer.shape, buffer.stride())
        return tensor.requires_grad_(buffer.requires_grad)

    def leave_used(self) -> None:
        """Stop reusing buffers that are still referenced at the end of a step."""
        for storages in self._storages.values():
            pairs = zip(storages, _references(storages), strict=True)
            storages[:] = [storage for storage, references in pairs if references == _ALONE]

    def clear(self) -> None:
        """Leave all buffers to their users, if any."""
        self._storages.clear()


def _references(storages: Sequence[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """Return how many references each storage has: from Python, and from tensors."""
    return [(sys.getrefcount(storage), use_count(storage._cdata)) for storage in storages]


_ALONE = _references([torch.UntypedStorage(0, device="cpu")])[0]


def allocate(infos: Iterable[Any], new: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Allocate the buffers that are not in use."""
    for info in infos:
        buffer = getattr(info, "buffer", None)  # the first stage's inputs have none
        if buffer is not None and buffer.is_meta:
            info.buffer = new(buffer)


def free(infos: Iterable[Any]) -> None:
    """Drop the buffers; their users keep them."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and not buffer.is_meta:
            info.buffer = empty_on(META, buffer)


def empty_on(device: torch.device, buffer: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor like ``buffer`` on another device."""
    return torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)

"""A small caching allocator that makes CPU addresses behave as in a CUDA graph pool.

Sizes are rounded to 512 bytes. Blocks are cut from segments by best fit. Freed blocks merge with
free neighbours and serve later allocations. Segments are never freed. These properties make a
shared pool unsafe, so a plan that corrupts memory on a GPU does so here, too. Streams, the real
allocator's size classes and its fragmentation limits are not modelled.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph.graphs.addresses import AddressRange, AddressRanges, Pool
from chunkgraph.graphs.allocations import Allocation, missing_bytes
from chunkgraph.graphs.operators import tensors_in

ROUND_BYTES = 512
SEGMENT_BYTES = 1 << 20
PAGE_BYTES = 4096


class SimulatedPool(Pool):
    """One pool of segments with a best-fit free list.

    Args:
        label: Name of the pool in errors.
        take_segment: Callback with the bytes of segments before they are allocated, or wake.
    """

    def __init__(self, label: str, take_segment: Callable[[int], object] = lambda _: None) -> None:
        self.label = label
        self.device = torch.device("cpu")
        self.is_of_caller = False  # if it serves a caller, its tensors are to graphs as any others
        self._take_segment = take_segment
        self._segments: list[tuple[int, np.ndarray]] = []
        self._free: list[tuple[int, int]] = []  # (num_bytes, start), sorted: best fit first
        self._used: dict[int, int] = {}  # start -> num_bytes
        self._aliases: dict[int, StorageWeakRef] = {}
        # A storage may be freed at any point: by the garbage collector in the middle of a line of
        # this class, or in another thread (gloo's). So finalizers only append to this queue.
        self._dead: deque[int] = deque()  # starts

    def reserve(self, num_bytes: int, allocations: Sequence[Sequence[Allocation]] = ()) -> None:
        """Add one free segment for later captures, unless there is one. See `Pool`."""
        self._release_dead()
        num_bytes = missing_bytes(num_bytes, allocations, [size for size, _ in self._free])
        if num_bytes > 0:
            with suppress(torch.OutOfMemoryError):  # `allocate` raises one where it is missing
                insort(self._free, self._new_segment(num_bytes))

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """Allocate a storage in the pool; its block is free when its last tensor is freed.

        Args:
            num_bytes: Number of bytes, at least 1.

        Returns:
            A CPU storage of exactly ``num_bytes`` bytes with undefined contents.
        """
        size = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        start = self._take(size)
        owner = self._bytes_at(start, num_bytes)
        storage = torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()
        self._used[start] = size
        # The storage keeps `owner` alive, so both are freed together.
        weakref.finalize(owner, self._dead.append, start).atexit = False
        return storage

    @contextmanager
    def serving_this_thread(self) -> Iterator[None]:
        """See `Pool`; results of operators are moved here."""
        self.is_of_caller |= not self._segments
        with _Moving(self):
            yield

    def move(self, tensors: Iterable[torch.Tensor], kept: Container[int]) -> list[int | None]:
        """Move the storages of tensors into the pool.

        Args:
            tensors: Tensors of which some may share a storage.
            kept: Addresses of storages that stay where they are.

        Returns:
            The new address of each tensor's storage; None where it stays.
        """
        moved: dict[int, torch.UntypedStorage] = {}
        starts: list[int | None] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if tensor.is_meta or storage.nbytes() == 0 or start in kept:
                starts.append(None)
                continue
            if start not in moved:
                moved[start] = self.allocate(storage.nbytes())
                moved[start].copy_(storage)
            tensor.set_(moved[start], tensor.storage_offset(), tensor.size(), tensor.stride())
            starts.append(moved[start].data_ptr())
        return starts

    def sleep(self) -> None:
        """Lose all contents. See `Pool`."""
        self.poison()
        self.is_asleep = True

    def wake(self) -> None:
        """Lose what was written meanwhile. See `Pool`."""
        self._take_segment(self.reserved_bytes)
        self.is_asleep = False
        self.poison()

    def alias(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage on the same bytes that does not keep the block in use.

        It keeps the segment alive, as a CUDA graph keeps its pool.
        """
        storage = torch.frombuffer(
            self._bytes_at(start, num_bytes), dtype=torch.uint8
        ).untyped_storage()
        self._aliases[storage._cdata] = StorageWeakRef(storage)
        return storage

    def is_alias(self, storage: torch.UntypedStorage) -> bool:
        """See `Pool.is_alias`."""
        reference = self._aliases.get(storage._cdata)
        return reference is not None and not reference.expired()

    def owns(self, address: int) -> bool:
        """Return whether ``address`` lies in one of the pool's segments."""
        return any(base <= address < base + seg.nbytes for base, seg in self._segments)

    def live(self) -> AddressRanges:
        """Return the addresses of the blocks in use (rounded sizes)."""
        self._release_dead()
        return AddressRanges((start, start + size) for start, size in self._used.items())

    def reserved(self) -> AddressRanges:
        """Return the addresses of all segments."""
        return AddressRanges((base, base + seg.nbytes) for base, seg in self._segments)

    def relative(self, ranges: AddressRanges) -> list[tuple[int, AddressRange]]:
        """See `Pool.relative`."""
        found: list[tuple[int, AddressRange]] = []
        begin = 0
        for base, segment in self._segments:
            inside = ranges & AddressRanges([(base, base + segment.nbytes)])
            found += [(begin + r.start - base, r) for r in inside]
            begin += segment.nbytes
        return found

    def _segment_of(self, address: int) -> tuple[int, np.ndarray]:
        return next((b, seg) for b, seg in self._segments if b <= address < b + seg.nbytes)

    def _bytes_at(self, start: int, num_bytes: int) -> np.ndarray:
        base, segment = self._segment_of(start)
        return segment[start - base : start - base + num_bytes]

    def _take(self, size: int) -> int:
        self._release_dead()
        index = next((i for i, (free, _) in enumerate(self._free) if free >= size), None)
        free_size, start = self._new_segment(size) if index is None else self._free.pop(index)
        if free_size > size:
            insort(self._free, (free_size - size, start + size))
        return start

    def _new_segment(self, size: int) -> tuple[int, int]:
        num_bytes = -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
        self._take_segment(num_bytes)
        raw = np.empty(num_bytes + PAGE_BYTES, dtype=np.uint8)
        # Page alignment, since vectorized kernels must see the alignment of eager memory.
        shift = -raw.ctypes.data % PAGE_BYTES
        segment = raw[shift : shift + num_bytes]
        self._segments.append((segment.ctypes.data, segment))
        return num_bytes, segment.ctypes.data

    def _release_dead(self) -> None:
        while self._dead:
            self._release(self._dead.popleft())

    def _release(self, start: int) -> None:
        end = start + self._used.pop(start)
        base, segment = self._segment_of(start)
        end_of_segment = base + segment.nbytes
        for free_size, free_start in list(self._free):
            if free_start + free_size == start and free_start >= base:
                self._free.remove((free_size, free_start))
                start = free_start
            elif free_start == end and end < end_of_segment:
                self._free.remove((free_size, free_start))
                end += free_size
        insort(self._free, (end - start, start))


class _Moving(TorchDispatchMode):
    """Move all results of operators into a pool."""

    def __init__(self, pool: SimulatedPool) -> None:
        super().__init__()
        self._pool = pool

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in(*args, *kwargs.values())}
        out = func(*args, **kwargs)
        self._pool.move(tensors_in(out), inputs)
        return out

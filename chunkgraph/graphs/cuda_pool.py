"""Private memory pools of torch's caching allocator, and its history of allocations."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch

from chunkgraph.errors import ConfigError
from chunkgraph.graphs.addresses import AddressRange, AddressRanges, Pool, tensor_at
from chunkgraph.graphs.allocations import Allocation, AllocationLog, missing_bytes
from chunkgraph.graphs.arena import Arena


class CUDAPool(Pool):
    """A private pool of the caching allocator.

    Args:
        label: Name of the pool in errors.
        device: Its device.
        stream: The capture stream: a freed block serves only its own stream.
        can_sleep: Whether it takes its memory from an `Arena`.

    Raises:
        ConfigError: torch does not ask the arena for memory.
    """

    def __init__(
        self, label: str, device: torch.device, stream: torch.cuda.Stream, *, can_sleep: bool
    ) -> None:
        self.label, self.device, self._stream = label, device, stream
        with torch.cuda.device(device):
            self._arena = Arena(device.index) if can_sleep else None
            pool = torch.cuda.MemPool(self._arena.allocator) if self._arena is not None else None
        self.handle: Any = torch.cuda.graph_pool_handle() if pool is None else pool.id
        # The pool exists while this object does, not only while its graphs do.
        torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, self.handle)
        torch._C._cuda_endAllocateToPool(device.index, self.handle)
        weakref.finalize(self, torch._C._cuda_releasePool, device.index, self.handle).atexit = False
        if self._arena is None:
            return
        weakref.finalize(self, self._arena.retire).atexit = False
        self.allocate(1)
        if not self._arena.num_segments:
            raise ConfigError(
                f"can_sleep=True, but torch {torch.__version__} takes memory of {label} from "
                "elsewhere. Capture outside of regions of other memory pools (use_mem_pool, "
                "torch_memory_saver); unset expandable_segments in PYTORCH_ALLOC_CONF and "
                "PYTORCH_CUDA_ALLOC_CONF; or use a newer torch."
            )

    @contextmanager
    def serving_this_thread(self) -> Iterator[None]:
        """Serve this thread's allocations from this pool, also inside another pool's capture."""
        index = self.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, self.handle)
            torch._C._cuda_releasePool(index, self.handle)

    def alias(self, start: int, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage on the pool's memory that keeps no block in use."""
        return tensor_at(start, num_bytes, self.device).untyped_storage()

    def reserve(self, num_bytes: int, allocations: Sequence[Sequence[Allocation]] = ()) -> None:
        """Allocate and free one segment for later captures; not during a capture. See `Pool`.

        Do nothing if the allocator is configured not to split large blocks: captures could not use
        the segment.
        """
        large = (s for s in self._segments() if s["segment_type"] == "large")  # see `block_bytes`
        blocks = (block for segment in large for block in segment["blocks"])
        free = [block["size"] for block in blocks if block["state"] == "inactive"]
        num_bytes = missing_bytes(num_bytes, allocations, free)
        if num_bytes > 0 and not _keeps_large_blocks_whole():
            if self._arena is not None:
                with suppress(torch.OutOfMemoryError):  # torch raises one that says more
                    self._arena.prepare(num_bytes)
            self.allocate(num_bytes)

    def allocate(self, num_bytes: int) -> torch.UntypedStorage:
        """See `Pool`."""
        with torch.cuda.stream(self._stream), self.serving_this_thread():
            # Deterministic torch fills an empty tensor, here behind what other streams write to it.
            return torch.UntypedStorage(num_bytes, device=self.device)

    def sleep(self) -> None:
        """See `Pool`."""
        assert self._arena is not None
        self._arena.sleep()
        self.is_asleep = True

    def wake(self) -> None:
        """See `Pool`."""
        assert self._arena is not None
        self._arena.wake()
        self.is_asleep = False

    def live(self) -> AddressRanges:
        """Return the addresses of allocated blocks, from the allocator's snapshot."""
        blocks: list[tuple[int, int]] = []
        for segment in self._segments():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    blocks.append((address, address + block["size"]))
                address += block["size"]
        return AddressRanges(blocks)

    def reserved(self) -> AddressRanges:
        """Return the addresses of the pool's segments, from the allocator's snapshot."""
        return AddressRanges(
            (s["address"], s["address"] + s["total_size"]) for s in self._segments()
        )

    def relative(self, ranges: AddressRanges) -> list[tuple[int, AddressRange]] | None:
        """See `Pool.relative`."""
        if self._arena is None:
            return None
        return [(r.start - self._arena.start, r) for r in ranges]

    def _segments(self) -> list[dict]:
        pool_id = tuple(self.handle)
        return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool_id]


def _keeps_large_blocks_whole() -> bool:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("max_split_size_mb" in os.environ.get(name, "") for name in names)


class CudaAllocations(AllocationLog):
    """The allocations of the allocator's history; none if the user records it meanwhile.

    Args:
        stream: The stream of the allocations.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._is_recording = False
        self._num_before = 0

    def __enter__(self) -> Self:
        if not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history("all", context=None)
            self._is_recording = True
            self._num_before = len(self._trace())
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(None)

    def num_events(self) -> int:
        """See `AllocationLog`."""
        return len(self._events())

    def allocations(self) -> list[Allocation]:
        """See `AllocationLog`."""
        begun: dict[int, tuple[int, int]] = {}
        allocations: list[Allocation] = []
        for number, event in enumerate(self._events()):
            address = event["addr"]
            if event["action"] == "alloc" and event["stream"] == self._stream.cuda_stream:
                begun[address] = event["size"], number
            elif event["action"] == "free_requested" and address in begun:
                allocations.append(Allocation(*begun.pop(address), number))
        return allocations + [Allocation(*place, None) for place in begun.values()]

    def _events(self) -> list[dict[str, Any]]:
        return self._trace()[self._num_before :] if self._is_recording else []

    def _trace(self) -> list[dict[str, Any]]:
        return torch.cuda.memory._snapshot()["device_traces"][self._stream.device_index]

"""Ranges of addresses on a CUDA device whose memory can be given back and mapped again.

A private pool of torch's allocator takes its segments from its arena, one after the other. So all
of its blocks, small ones too, lie in one range. A copy or a memset may span segments: neighbouring
mappings of one reservation are one range for the device. A graph holds addresses and no memory, so
it can be replayed once they are mapped again, whatever the new memory contains.

Other devices and processes cannot access the memory. NCCL must not register it
(`check_environment`); it then copies through its own buffers.

torch calls back with its allocator locked, and a callback needs the GIL. Another thread that holds
the GIL while it waits for that lock would wait forever: torch releases the GIL when it allocates
and frees tensors, but not in `torch.cuda.memory_stats`. So callbacks are short. They keep the GIL
while they call the driver, and large memory is mapped before torch asks for it.
"""

from __future__ import annotations

import ctypes
import os
import traceback
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError

_OUT_OF_MEMORY = 2  # of the driver's errors

# The two functions of a pluggable allocator of torch.
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

_ALLOCATORS: list[Any] = []
"""What torch may call until the process ends: not every release keeps a pool's allocator alive."""


def check_environment() -> None:
    """Refuse settings with which other ranks would go on using memory that was given back.

    Raises:
        ConfigError: NCCL may register memory of graphs, or all memory of torch's allocator.
    """
    name, remedy = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "Unset"
    is_registered = os.environ.get(name, "0").lower() in ("1", "true", "yes", "y")
    if not is_registered and dist.is_available() and dist.is_initialized():
        name, remedy = "NCCL_GRAPH_REGISTER", "Before the job starts, set to 0"
        is_registered = dist.get_world_size() > 1 and os.environ.get(name) != "0"
    if is_registered:
        raise ConfigError(
            "can_sleep=True, but NCCL registers the graphs' memory with other ranks, which would "
            f"go on using it after sleep(). {remedy} on every rank: {name}."
        )


def _call(name: str, *args: Any) -> None:
    """Call a function of the driver; integers are passed with 64 bits.

    Raises:
        torch.OutOfMemoryError: too little memory of the device is free.
        RuntimeError: any other error of the driver.
    """
    driver = ctypes.PyDLL("libcuda.so.1")  # keeps the GIL; see the module
    passed = [ctypes.c_uint64(arg) if isinstance(arg, int) else arg for arg in args]
    status = getattr(driver, name)(*passed)
    if status:
        kind = torch.OutOfMemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise kind(f"{name} failed with error {status} of the CUDA driver")


class Arena:
    """A range of addresses as large as the device's memory, mapped from its start as needed.

    Args:
        device: Index of the device, whose context is current.

    Attributes:
        allocator: What serves a `torch.cuda.MemPool` from the arena.
        num_segments: Number of segments that torch has.
        start: Its first address; 0 once it is closed.
    """

    def __init__(self, device: int) -> None:
        # CUmemAllocationProp: pinned memory, not exported, of this device; no further properties.
        self._properties = ctypes.byref((ctypes.c_int * 8)(1, 0, 1, device))
        # CUmemAccessDesc: this device may read and write.
        self._access = ctypes.byref((ctypes.c_int * 3)(1, device, 3))
        grain, start = ctypes.c_size_t(), ctypes.c_uint64()
        _call("cuMemGetAllocationGranularity", ctypes.byref(grain), self._properties, 0)
        self._grain = grain.value
        self._num_bytes = self._rounded(torch.cuda.mem_get_info(device)[1])
        _call("cuMemAddressReserve", ctypes.byref(start), self._num_bytes, 0, 0, 0)
        self.start = self._end = self._mapped_end = start.value
        self._mappings: list[tuple[int, int]] = []  # start and bytes
        self._is_retired = False
        self.num_segments = 0
        callbacks = _Allocate(self._allocate), _Free(self._free)
        addresses: list[Any] = [ctypes.cast(c, ctypes.c_void_p).value for c in callbacks]
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        _ALLOCATORS.append((callbacks, self.allocator))

    def prepare(self, num_bytes: int) -> None:
        """Map memory for the next segments.

        Raises:
            torch.OutOfMemoryError: too little memory of the device is free.
        """
        end = self._end + self._rounded(num_bytes)
        if end > self._mapped_end:
            self._map(self._mapped_end, end - self._mapped_end)
            self._mapped_end = end

    def sleep(self) -> None:
        """Give all memory back; keep the addresses. Nothing may be using it any more."""
        while self._mappings:
            _call("cuMemUnmap", *self._mappings[-1])
            self._mappings.pop()

    def wake(self) -> None:
        """Map new memory at the same addresses, in one piece, with undefined contents.

        Raises:
            torch.OutOfMemoryError: too little memory of the device is free; the arena sleeps.
        """
        if self._mapped_end > self.start:
            self._map(self.start, self._mapped_end - self.start)

    def retire(self) -> None:
        """Free the addresses as soon as torch has returned all segments."""
        self._is_retired = True
        self._close_if_unused()

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._grain) * self._grain

    def _map(self, start: int, num_bytes: int) -> None:
        handle = ctypes.c_uint64()
        _call("cuMemCreate", ctypes.byref(handle), num_bytes, self._properties, 0)
        try:
            _call("cuMemMap", start, num_bytes, 0, handle, 0)
            self._mappings.append((start, num_bytes))
            _call("cuMemSetAccess", start, num_bytes, self._access, 1)
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory

    def _allocate(self, num_bytes: int, _device: int, _stream: int | None) -> int | None:
        """Return the address of torch's next segment; None if there is no memory."""
        try:
            self.prepare(num_bytes)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            traceback.print_exception(error)  # torch reports too little memory
            return None
        start, self._end = self._end, self._end + self._rounded(num_bytes)
        self.num_segments += 1
        return start

    def _free(self, _start: int, _num_bytes: int, _device: int, _stream: int | None) -> None:
        self.num_segments -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self.num_segments and self.start:
            if self._mappings:
                _call("cuCtxSynchronize")
            self.sleep()
            _call("cuMemAddressFree", self.start, self._num_bytes)
            self.start = 0

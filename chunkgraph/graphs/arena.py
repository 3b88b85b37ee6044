"""Ranges of addresses on a CUDA device whose memory can be given back and mapped again.

A private pool of torch's allocator takes its segments from its arena, one after the other. So all
of its blocks, small ones too, lie in one range, and a copy or a memset may span segments: mappings
that are neighbours in one reservation are one range for the device. A graph holds addresses and no
memory, so it can be replayed once they are mapped again, whatever the new memory contains.

Only the arena's own device can access the memory. It cannot be exported to other processes, so
NCCL must not register it (`check_environment`) and uses its own buffers.

torch calls back with its allocator locked, and a callback needs the GIL. A thread that frees a
tensor of the device with the GIL waits for that lock. If it does so while a callback waits for the
GIL, both wait forever. So callbacks keep the GIL in calls of the driver, and large memory is mapped
before torch asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import traceback
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError

__all__ = ["Arena", "check_environment"]

_OUT_OF_MEMORY = 2
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
)  # of torch's pluggable allocators

_ALLOCATORS: list[Any] = []
"""What torch may call until the process ends: not every release keeps a pool's allocator alive."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def check_environment() -> None:
    """Refuse settings with which NCCL would go on using memory that was given back.

    Raises:
        ConfigError: NCCL may register memory of graphs or of torch's allocator.
    """
    is_parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if is_parallel and dist.is_nccl_available() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        raise ConfigError(
            "can_sleep=True, but NCCL registers the memory of captured collectives with other "
            "ranks, which would go on using it after sleep(). Set NCCL_GRAPH_REGISTER=0 in the "
            "environment of all ranks before the job starts."
        )
    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if os.environ.get(hook, "0").lower() in ("1", "true", "yes", "y"):
        raise ConfigError(
            f"can_sleep=True, but {hook} registers all memory of torch's allocator with NCCL, "
            f"which would go on using it after sleep(). Unset {hook}."
        )


@functools.cache
def _driver() -> ctypes.PyDLL:
    return ctypes.PyDLL("libcuda.so.1")  # keeps the GIL; see the module


def _call(name: str, *args: Any) -> None:
    """Call a function of the driver.

    Raises:
        torch.OutOfMemoryError: the device has not enough free memory.
        RuntimeError: any other error of the driver.
    """
    status = getattr(_driver(), name)(*args)
    if status == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: not enough memory is free")
    if status:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")


class Arena:
    """A range of addresses as large as the device's memory, mapped from its start as needed.

    Args:
        device: Index of the device, whose context is current.

    Attributes:
        allocator: What serves a `torch.cuda.MemPool` from the arena.
        num_segments: Number of segments that torch has.
    """

    def __init__(self, device: int) -> None:
        location = _Location(_DEVICE, device)
        self._properties = _Properties(_PINNED, 0, location, None, 0)
        self._access = _Access(location, _READ_WRITE)
        grain, start = ctypes.c_size_t(), ctypes.c_uint64()
        _call(
            "cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(self._properties), 0
        )
        self._grain = grain.value
        self._num_bytes = self._rounded(torch.cuda.mem_get_info(device)[1])
        _call(
            "cuMemAddressReserve",
            ctypes.byref(start),
            ctypes.c_size_t(self._num_bytes),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._start = self._end = self._mapped_end = start.value
        self._mappings: list[tuple[int, int]] = []
        self._is_retired = False
        self.num_segments = 0
        callbacks = _Allocate(self._allocate), _Free(self._free)
        addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in callbacks]
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        _ALLOCATORS.append((callbacks, self.allocator))

    @property
    def mapped_bytes(self) -> int:
        """Return the bytes that are mapped, or were before `sleep`."""
        return self._mapped_end - self._start

    def prepare(self, num_bytes: int) -> None:
        """Map memory for the next segments, outside of a callback.

        Raises:
            torch.OutOfMemoryError: the device has not enough free memory.
        """
        missing = self._end + self._rounded(num_bytes) - self._mapped_end
        if missing > 0:
            if self._mapped_end + missing > self._start + self._num_bytes:
                raise torch.OutOfMemoryError("the arena is full")
            self._map(self._mapped_end, missing)
            self._mapped_end += missing

    def sleep(self) -> None:
        """Give all memory back; keep the addresses. Nothing may be using it any more."""
        while self._mappings:
            start, num_bytes = self._mappings[-1]
            _call("cuMemUnmap", ctypes.c_uint64(start), ctypes.c_size_t(num_bytes))
            self._mappings.pop()

    def wake(self) -> None:
        """Map new memory at the same addresses, with undefined contents.

        Raises:
            torch.OutOfMemoryError: the device has not enough free memory; the arena still sleeps.
        """
        if self.mapped_bytes:
            self._map(self._start, self.mapped_bytes)

    def retire(self) -> None:
        """Free the addresses as soon as torch has returned all segments."""
        self._is_retired = True
        self._close_if_unused()

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._grain) * self._grain

    def _map(self, start: int, num_bytes: int) -> None:
        place, size = ctypes.c_uint64(start), ctypes.c_size_t(num_bytes)
        handle = ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        _call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        try:
            _call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self._mappings.append((start, num_bytes))
            _call("cuMemSetAccess", place, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory

    def _allocate(self, num_bytes: int, _device: int, _stream: int | None) -> int | None:
        """Return the next segment's address; None if there is no memory."""
        try:
            self.prepare(num_bytes)
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            traceback.print_exception(error)  # torch reports too little memory
            return None
        start = self._end
        self._end += self._rounded(num_bytes)
        self.num_segments += 1
        return start

    def _free(self, _start: int, _num_bytes: int, _device: int, _stream: int | None) -> None:
        self.num_segments -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._is_retired and not self.num_segments and self._start:
            if self._mappings:
                _call("cuCtxSynchronize")
            self.sleep()
            start, self._start = self._start, 0
            _call("cuMemAddressFree", ctypes.c_uint64(start), ctypes.c_size_t(self._num_bytes))

"""CUDA graphs: `torch.cuda.CUDAGraph` behind the contract.

Captures use mode ``thread_local`` (the watchdog thread of NCCL may query events meanwhile) and
one stream for all, since the caching allocator reuses a freed block only on the stream it came
from.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from chunkgraph._collector import collector_paused
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs.addresses import AddressRanges, tensor_at
from chunkgraph.graphs.contract import Pool, Router
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.host_constants import HostConstants, HostMemory
from chunkgraph.graphs.legality import CapturedGenerator, check_backward
from chunkgraph.graphs.memset_nodes import DamagedGraphError, MemsetKernels
from chunkgraph.graphs.random_state import private_generator, states_put_back

__all__ = ["CUDABackend"]


class CUDAPool:
    """A private pool of the caching allocator."""

    def __init__(self, label: str, device: torch.device, stream: torch.cuda.Stream) -> None:
        self.label = label
        self.device = device
        self._stream = stream  # of the captures: a freed block serves only the stream it came from
        self.handle = torch.cuda.graph_pool_handle()
        self._is_held = False

    def hold(self) -> None:
        """Make the pool and keep it while this object lives; otherwise its graphs alone do."""
        if not self._is_held:
            self._is_held = True
            index = self.device.index
            torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
            torch._C._cuda_endAllocateToPool(index, self.handle)
            weakref.finalize(self, torch._C._cuda_releasePool, index, self.handle).atexit = False

    @contextmanager
    def serving_this_thread(self) -> Iterator[None]:
        """Inside, this thread's allocations come from here, also within another pool's capture."""
        index = self.device.index
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self.handle)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(index, self.handle)
            torch._C._cuda_releasePool(index, self.handle)

    def is_alias(self, _storage: torch.UntypedStorage) -> bool:
        """A CUDA graph holds addresses alone."""
        return False

    def reserve(self, num_bytes: int) -> None:
        """One segment of that size, free, for the captures that follow. Not during a capture.

        Nothing where the allocator was told to split no large blocks: they would not use it.
        """
        if num_bytes > 0 and not _keeps_large_blocks_whole():
            self.hold()
            with torch.cuda.stream(self._stream), self.serving_this_thread():
                torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pool's segments."""
        return self.reserved().num_bytes

    @property
    def num_allocations(self) -> int:
        """Number of segments: memory taken from the device so far."""
        return len(self._segments())

    def live(self) -> AddressRanges:
        """Addresses of allocated blocks, from the allocator's snapshot."""
        found: list[tuple[int, int]] = []
        for segment in self._segments():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    found.append((address, address + block["size"]))
                address += block["size"]
        return AddressRanges(found)

    def reserved(self) -> AddressRanges:
        """Addresses of the pool's segments, from the allocator's snapshot."""
        return AddressRanges(
            (s["address"], s["address"] + s["total_size"]) for s in self._segments()
        )

    def poison(self) -> None:
        """Fill all segments with 0xFF bytes on the current stream."""
        for area in self.reserved():
            tensor_at(area.start, area.end - area.start, self.device).fill_(0xFF)

    def _segments(self) -> list[dict]:
        wanted = tuple(self.handle)
        return [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == wanted]


def _graphs_exist() -> bool:
    """Whether the process has a CUDA graph, or the beginning of one."""
    kinds = set(map(type, gc.get_objects()))
    return any(issubclass(kind, torch.cuda.CUDAGraph) for kind in kinds)


def _keeps_large_blocks_whole() -> bool:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("max_split_size_mb" in os.environ.get(name, "") for name in names)


class CUDAGraphHandle:
    """A captured CUDA graph and the pool that it writes."""

    def __init__(
        self,
        label: str,
        pool: CUDAPool,
        scratch: CUDAPool | None = None,
        constants: HostConstants | None = None,
        *,
        memset_kernels: MemsetKernels | None = None,
    ) -> None:
        self.label = label
        self.pool = pool
        self.scratch = scratch
        self._constants = constants  # keeps what the graph copies from
        self._memset_kernels = memset_kernels
        self.graph: torch.cuda.CUDAGraph | None = (
            torch.cuda.CUDAGraph(keep_graph=True) if memset_kernels else torch.cuda.CUDAGraph()
        )
        self.num_memset_kernels = 0
        self.memsets_kept = ""

    def finish(self) -> None:
        """End the capture, and make what the device runs of it.

        Where memsets could not be replaced, ``memsets_kept`` says why; the graph has them still.
        """
        graph = self.graph
        assert graph is not None
        graph.capture_end()
        if self._memset_kernels is None:
            return
        try:
            try:
                self.num_memset_kernels = self._memset_kernels.replace(graph.raw_cuda_graph())
            except DamagedGraphError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, the graph is as it was
                self.memsets_kept = str(error) or type(error).__name__
            graph.instantiate()
        except BaseException:
            self.release()
            raise

    def replay(self) -> None:
        """Launch on the current stream; the host does not wait.

        Raises:
            ReplayMismatchError: what the capture read on the host has changed.
        """
        if self.graph is None:
            raise CaptureError(
                f"{self.label} was released or never captured; it cannot be replayed."
            )
        if self._constants is not None:
            for tensor in self._constants.outside:
                tensor.check(self.label)
        self.graph.replay()

    def writes(self) -> AddressRanges:
        """All of its pools: which part a kernel writes is not to be read from a CUDA graph."""
        own = self.pool.reserved()
        return own if self.scratch is None else own | self.scratch.reserved()

    def release(self) -> None:
        """Destroy the graph; its pool is freed with the last graph on it."""
        if self.graph is not None:
            self.graph.reset()
            self.graph = self._constants = None


class _CaptureMode(TorchDispatchMode):
    """Sees the operators of a capture: chooses their pools and serves what they read on the host.

    Args:
        label: of the capture, for errors.
        router: of pools; None: there is one.
        memory: of the constants.
    """

    def __init__(self, label: str, router: Router | None, memory: HostMemory) -> None:
        super().__init__()
        self.scratch: CUDAPool | None = None
        if router is not None:
            assert isinstance(router.scratch, CUDAPool)
            router.scratch.hold()
            self.scratch = router.scratch
        self.constants = HostConstants(label, memory)
        self._label = label
        self._router = router

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts stay compiled; what they allocate goes to the capture's pool."""
        return True

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        check_backward(func, args, self._label)
        if self.scratch is None or self._router is None or not self._router.goes_to_scratch(func):
            return self.constants.run(func, args, kwargs or {})
        with self.scratch.serving_this_thread():
            return self.constants.run(func, args, kwargs or {})


@contextmanager
def _lifting_from_host() -> Iterator[None]:
    """Let `torch.tensor` with a device copy by an operator that dispatch modes see."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class CUDABackend:
    """Graphs on one CUDA device.

    Args:
        device: the device whose current context captures run in.
        memset_kernels: whether small memsets inside graphs become kernels, where this torch and
            its CUDA bindings can do that; else ``memsets_kept`` says why not.
    """

    name = "cuda"

    def __init__(self, device: torch.device | None = None, *, memset_kernels: bool = True) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self._token = torch.zeros(1, device=self.device)
        self._host_memory: HostMemory | None = None
        self._memset_kernels: MemsetKernels | None = None
        self.memsets_kept = ""
        if memset_kernels:
            words = torch.zeros(3, dtype=torch.int32, device=self.device)
            try:
                with torch.cuda.device(self.device):
                    self._memset_kernels = MemsetKernels(words)
            except Exception as error:  # noqa: BLE001 - whatever it is, graphs work without
                self.memsets_kept = str(error) or type(error).__name__

    def new_pool(self, label: str) -> CUDAPool:
        """A new private pool."""
        return CUDAPool(label, self.device, self.stream)

    @contextmanager
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        router: Router | None = None,
    ) -> Iterator[CUDAGraphHandle]:
        """Stream-capture the block. See `GraphBackend.capture`."""
        assert isinstance(pool, CUDAPool)
        if self._host_memory is None:
            self._host_memory = HostMemory(is_pinned=True)
        mode = _CaptureMode(label, router, self._host_memory)
        handle = CUDAGraphHandle(
            label, pool, mode.scratch, mode.constants, memset_kernels=self._memset_kernels
        )
        graph = handle.graph
        assert graph is not None
        for generator in generators:
            graph.register_generator_state(generator)
        self.synchronize()
        with collector_paused(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                with private_generator(CapturedGenerator(label)), _lifting_from_host(), mode:
                    yield handle
            except BaseException as error:
                self._abandon(handle, generators)
                if isinstance(error, ChunkGraphError) or not isinstance(error, Exception):
                    raise
                raise capture_failure(label, error) from error
            try:
                handle.finish()
            except Exception as error:
                if handle.graph is not None:
                    self._abandon(handle, generators)
                raise capture_failure(label, error) from error
            if handle.memsets_kept:
                self._memset_kernels, self.memsets_kept = None, handle.memsets_kept
                warnings.warn(
                    f"Memsets inside graphs stay what they are, from {label} on, which costs some "
                    f"microseconds each: {handle.memsets_kept}. memset_kernels=False says no more.",
                    stacklevel=3,
                )

    def _abandon(self, handle: CUDAGraphHandle, generators: Sequence[torch.Generator]) -> None:
        """End a capture that failed; the error it reports is the consequence, not the cause.

        An invalidated capture leaves the random generators marked as capturing. Only the end of a
        sound capture clears the mark, so a small one follows.
        """
        graph, handle.graph = handle.graph, None
        assert graph is not None
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        del graph
        # torch 2.11 leaves the allocator recording into the pool, and the pool in use for ever.
        # Where torch has ended the recording itself, the first call says so and both are skipped.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, handle.pool.handle)
            torch._C._cuda_releasePool(self.device.index, handle.pool.handle)
        cleanup = torch.cuda.CUDAGraph()
        for generator in generators:
            cleanup.register_generator_state(generator)
        cleanup.capture_begin(capture_error_mode="thread_local")
        self._token.add_(0)
        cleanup.capture_end()
        cleanup.reset()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Run on the capture stream, ordered after and before the current stream's work."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # what an error leaves running there is followed by putting state back here
            current.wait_stream(self.stream)

    @contextmanager
    def preserve_random_state(self, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Put the states of the device's default generator and of ``generators`` back on exit."""
        default = torch.cuda.default_generators[self.device.index]
        with states_put_back((default, *generators)):
            yield

    def release_cached_memory(self) -> None:
        """Empty the allocator's cache: blocks of eager steps cannot serve a private pool.

        cuBLAS's workspaces go with it, one for each thread and stream that ever made a product;
        torch takes new ones where products still come. Only graphs hold the address of one, so none
        is freed where any are in the process, be they another engine's or the user's.
        """
        self.synchronize()
        if not _graphs_exist():
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def take_workspaces(self) -> None:
        """Have torch take those of the capture stream: for this thread, and for autograd's.

        With an empty cache each gets a segment of its own. Taken in a pass or capture, it would be
        cut out of a larger block, and pin all of that.
        """
        with self.on_capture_stream(), torch.enable_grad():
            factor = torch.zeros(16, 16, device=self.device, requires_grad=True)
            product = torch.addmm(factor[0], factor, factor) @ factor  # cuBLASLt's, and cuBLAS's
            torch.autograd.backward(product, torch.zeros_like(factor))

    def allocated_bytes(self) -> int:
        """Bytes of live tensors on the device."""
        return torch.cuda.memory_allocated(self.device)

    def divisible_bytes(self) -> int:
        """Of those, bytes in large blocks: the allocator gives small ones segments of their own."""
        stats = torch.cuda.memory_stats(self.device)
        return stats.get("allocated_bytes.large_pool.current", 0)

    def free_bytes(self) -> int | None:
        """Free on the device, plus what the allocator keeps without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def raw(self, tensor: torch.Tensor) -> AddressRanges:
        """The addresses of the storage behind ``tensor``."""
        storage = tensor.untyped_storage()
        return AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])

"""`CUDABackend`: the graph contract on top of `torch.cuda.CUDAGraph`.

Captures use the mode ``thread_local``, since NCCL's watchdog thread may query events meanwhile.
All captures use one stream, since the caching allocator reuses a freed block only on its stream.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from chunkgraph._collector import collector_paused
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs.addresses import AddressRange, AddressRanges, Pool
from chunkgraph.graphs.arena import check_environment
from chunkgraph.graphs.capture_mode import CaptureMode, HostMemory
from chunkgraph.graphs.contract import GraphBackend
from chunkgraph.graphs.copies import CudaCopier
from chunkgraph.graphs.cuda_pool import CudaAllocations, CUDAPool
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.graph_nodes import CudaCopyNode, GraphEditor
from chunkgraph.graphs.random_state import (
    CapturedGenerator,
    answering_calls,
    answering_device_calls,
)


class CUDAGraphHandle:
    """A captured CUDA graph and the pool that it writes.

    Args:
        label: Name of the graph in errors.
        pool: Pool that the graph writes.
        memory: Host memory that the graph copies from, kept while the graph exists.
        editor: Changes the graph before it is instantiated; None: nothing does.
        targets: Memory that ``copy_nodes`` copy to, if there is an editor.
    """

    def __init__(
        self,
        label: str,
        pool: CUDAPool,
        memory: HostMemory | None = None,
        editor: GraphEditor | None = None,
        targets: Sequence[AddressRange | None] = (),
    ) -> None:
        self.label, self.pool = label, pool
        self._memory, self._editor = memory, editor
        can_copy = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
        self._targets = targets if can_copy else ()
        self.copy_nodes: Sequence[CudaCopyNode | None] = ()
        self.graph: torch.cuda.CUDAGraph | None = (
            torch.cuda.CUDAGraph() if editor is None else torch.cuda.CUDAGraph(keep_graph=True)
        )
        self.num_memset_kernels = 0

    def finish(self) -> None:
        """End the capture, replace memsets, add copies and instantiate the graph.

        Raises:
            CaptureError: The driver failed to change the graph.
        """
        graph = self.graph
        assert graph is not None
        graph.capture_end()
        if self._editor is None:
            return
        try:
            nodes = self._edit(self._editor, graph.raw_cuda_graph())
            graph.instantiate()
            for node in filter(None, nodes):
                node.begin(graph.raw_cuda_graph_exec())
            self.copy_nodes = nodes
        except BaseException:
            self.release()
            raise

    def _edit(self, editor: GraphEditor, graph: int) -> Sequence[CudaCopyNode | None]:
        try:
            self.num_memset_kernels = editor.replace_memsets(graph)
            return editor.add_copies(graph, self._targets) if self._targets else ()
        except RuntimeError as error:
            raise CaptureError(
                f"Capturing {self.label} failed: the driver cannot change the graph: {error}.\n"
                "  To do: pass memset_kernels=False, which leaves graphs as they are captured."
            ) from error

    def replay(self) -> None:
        """Launch on the current stream; the host does not wait."""
        if self.graph is None:
            raise CaptureError(
                f"{self.label} was released or never captured; it cannot be replayed."
            )
        self.graph.replay()

    def writes(self) -> AddressRanges:
        """Return all memory of its pool; a CUDA graph does not expose what its kernels write."""
        return self.pool.reserved()

    def reads(self) -> AddressRanges:
        """Return no address; a CUDA graph does not expose what its kernels read."""
        return AddressRanges()

    def release(self) -> None:
        """Destroy the graph; its pool is freed with its last graph."""
        if self.graph is not None:
            for node in filter(None, self.copy_nodes):
                node.end()
            self.graph.reset()
            self.graph = self._memory = None


@contextmanager
def _lifting_from_host() -> Iterator[None]:
    """Make `torch.tensor` with a device copy through an operator that dispatch modes see."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Products(torch.autograd.Function):
    """Products by cuBLASLt and cuBLAS, in the forward and in the backward."""

    @staticmethod
    def forward(_ctx: Any, factor: torch.Tensor) -> torch.Tensor:
        return torch.addmm(factor[0], factor, factor) @ factor

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()  # the first kernel of a thread gives it the context that cuBLAS needs
        return torch.addmm(grad[0], grad, grad) @ grad


class CUDABackend(GraphBackend):
    """Capture and replay on one CUDA device.

    Args:
        device: The device; default the current one.
        memset_kernels: Whether captured graphs are changed (`chunkgraph.graphs.graph_nodes`). If
            this torch and its CUDA bindings cannot change them, ``memsets_kept`` holds the reason.
        can_sleep: See `GraphBackend`.

    Raises:
        ConfigError: See `chunkgraph.graphs.arena.check_environment`.
    """

    name = "cuda"
    repeats_bits = False

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        memset_kernels: bool = True,
        can_sleep: bool = False,
    ) -> None:
        if can_sleep:
            check_environment()
        self.can_sleep = can_sleep
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self.default_generator = torch.cuda.default_generators[self.device.index]
        self._editor: GraphEditor | None = None
        self.memsets_kept = ""
        with torch.cuda.device(self.device):
            self._token = torch.zeros(1, device=self.device)  # makes the device's context current
            self._host_memory = HostMemory(is_pinned=True)
            if memset_kernels:
                try:
                    self._editor = GraphEditor()
                except Exception as error:  # noqa: BLE001 - graphs work without it
                    self.memsets_kept = str(error) or type(error).__name__

    def new_pool(self, label: str) -> CUDAPool:
        """Return a new private pool."""
        return CUDAPool(label, self.device, self.stream, can_sleep=self.can_sleep)

    def new_copier(self) -> CudaCopier:
        """See `GraphBackend`."""
        return CudaCopier(self.device)

    @contextmanager
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        targets: Sequence[AddressRange | None] = (),
    ) -> Iterator[CUDAGraphHandle]:
        """Stream-capture the block. See `GraphBackend.capture`."""
        assert isinstance(pool, CUDAPool)
        generator = CapturedGenerator(label)
        handle = CUDAGraphHandle(label, pool, self._host_memory, self._editor, targets)
        graph = handle.graph
        assert graph is not None
        for registered in generators:
            graph.register_generator_state(registered)
        self.synchronize()
        with collector_paused(), self.on_capture_stream():  # torch writes seeds there
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                with (
                    answering_calls(CapturedGenerator(label)),
                    answering_device_calls(generator),
                    _lifting_from_host(),
                    CaptureMode(label, self._host_memory, generator),
                ):
                    yield handle
                generator.finish()
                handle.finish()
            except BaseException as error:
                if handle.graph is not None:
                    self._abandon(handle, generators)
                if isinstance(error, ChunkGraphError) or not isinstance(error, Exception):
                    raise
                raise capture_failure(label, error) from error

    def _abandon(self, handle: CUDAGraphHandle, generators: Sequence[torch.Generator]) -> None:
        """End a failed capture, and suppress the error that ending it raises.

        An invalidated capture leaves the random generators marked as capturing. Only the end of a
        successful capture clears the mark, so a small one follows.
        """
        graph, handle.graph = handle.graph, None
        assert graph is not None
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        del graph
        # torch 2.11 leaves the allocator recording into the pool, and the pool in use forever. If
        # torch ended the recording itself, the first call raises and both are skipped.
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
        """Run on the capture stream, ordered with the current stream's work before and after."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:  # also after an error, since the current stream then restores state
            current.wait_stream(self.stream)

    def release_cached_memory(self) -> None:
        """Empty the allocator's cache: blocks of eager steps cannot serve a private pool."""
        self.synchronize()
        torch.cuda.empty_cache()

    def release_workspaces(self) -> None:
        """Free cuBLAS's workspaces, unless a graph may use them, and empty the cache.

        There is one for each thread and stream that computed a product; torch allocates new ones
        on demand. Graphs hold addresses of workspaces, so none is freed if the process has any
        graph, including those of other owners.
        """
        self.synchronize()
        kinds = set(map(type, gc.get_objects()))
        if not any(issubclass(kind, torch.cuda.CUDAGraph) for kind in kinds):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def take_workspaces(self) -> None:
        """Make torch allocate the capture stream's workspaces, for this thread and autograd's.

        With an empty cache each workspace gets a separate segment. Allocated in a pass or a
        capture, it would be part of a larger block and keep all of that block in use.
        """
        with self.on_capture_stream(), torch.enable_grad():
            factor = torch.zeros(16, 16, device=self.device, requires_grad=True)
            torch.autograd.backward(_Products.apply(factor), factor.detach())

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors on the device."""
        return torch.cuda.memory_allocated(self.device)

    def observe_allocations(self) -> CudaAllocations:
        """Observe the allocations of eager work on the capture stream."""
        return CudaAllocations(self.stream)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device plus those that the allocator caches.

        The allocator counts private pools as reserved, even asleep, but they serve nobody else.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        own = (s for s in torch.cuda.memory_snapshot() if s["device"] == self.device.index)
        common = [s for s in own if tuple(s["segment_pool_id"]) == (0, 0)]
        return free + sum(s["total_size"] - s["allocated_size"] for s in common)

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

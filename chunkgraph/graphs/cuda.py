"""`CUDABackend`: the graph contract on top of `torch.cuda.CUDAGraph`.

Captures use the mode ``thread_local``, since NCCL's watchdog thread may query events meanwhile.
All captures use one stream, since the caching allocator reuses a freed block only on its stream.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload

from chunkgraph._collector import collector_paused
from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs.addresses import AddressRange, AddressRanges
from chunkgraph.graphs.captured_generator import CapturedGenerator, DrawOffsets
from chunkgraph.graphs.contract import Graph, Pool, Router
from chunkgraph.graphs.copy_nodes import CopyNodes, CudaCopyNode, warn_of_host_copies
from chunkgraph.graphs.cuda_allocations import CudaAllocations
from chunkgraph.graphs.cuda_draws import (
    CudaGenerator,
    GraphDraws,
    Sequences,
    measured_draws,
    saving_states,
)
from chunkgraph.graphs.cuda_pool import CUDAPool
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver
from chunkgraph.graphs.host_constants import HostConstants, HostMemory
from chunkgraph.graphs.legality import check_backward
from chunkgraph.graphs.memset_nodes import MemsetKernels
from chunkgraph.graphs.operator_mode import OperatorMode
from chunkgraph.graphs.random_state import preserve_states, private_generator

__all__ = ["CUDABackend"]


def _graphs_exist() -> bool:
    """Return whether the process has a CUDA graph, finished or not."""
    kinds = set(map(type, gc.get_objects()))
    return any(issubclass(kind, torch.cuda.CUDAGraph) for kind in kinds)


@dataclass(frozen=True)
class GraphChanges:
    """What a graph is changed with before it is instantiated."""

    memset_kernels: MemsetKernels | None = None
    copies: CopyNodes | None = None


UNCHANGED = GraphChanges()


class CUDAGraphHandle:
    """A captured CUDA graph and the pool that it writes."""

    def __init__(
        self,
        label: str,
        pool: CUDAPool,
        scratch: CUDAPool | None = None,
        constants: HostConstants | None = None,
        *,
        draws: GraphDraws,
        resumed: GraphDraws | None = None,
        changes: GraphChanges = UNCHANGED,
        targets: Sequence[AddressRange | None] = (),
    ) -> None:
        self.label = label
        self.pool = pool
        self.scratch = scratch
        self._constants = constants  # keeps the host memory that the graph copies from
        self.draws = draws
        self._resumed = resumed
        self._changes = changes
        self._targets = targets
        self.copy_nodes: tuple[CudaCopyNode | None, ...] = (None,) * len(targets)
        self.graph: torch.cuda.CUDAGraph | None = (
            torch.cuda.CUDAGraph()
            if changes == UNCHANGED
            else torch.cuda.CUDAGraph(keep_graph=True)
        )
        self.num_memset_kernels = 0
        self.memsets_kept = ""

    def finish(self) -> None:
        """End the capture, replace memsets, add copies and instantiate the graph.

        If memsets cannot be replaced, the graph keeps them and ``memsets_kept`` holds the reason.
        """
        graph = self.graph
        assert graph is not None
        graph.capture_end()
        if self._changes == UNCHANGED:
            return
        try:
            if self._changes.memset_kernels is not None:
                self._replace_memsets(self._changes.memset_kernels, graph.raw_cuda_graph())
            if self._changes.copies is not None:
                self.copy_nodes = self._changes.copies.add(graph.raw_cuda_graph(), self._targets)
            graph.instantiate()
            for node in self.copy_nodes:
                if node is not None:
                    node.begin(graph.raw_cuda_graph_exec())
        except BaseException:
            self.release()
            raise

    def _replace_memsets(self, kernels: MemsetKernels, graph: int) -> None:
        try:
            self.num_memset_kernels = kernels.replace(graph)
        except DamagedGraphError:
            raise
        except Exception as error:  # noqa: BLE001 - after any error the graph is unchanged
            self.memsets_kept = str(error) or type(error).__name__

    def replay(self) -> None:
        """Launch on the current stream; the host does not wait.

        Raises:
            ReplayMismatchError: A host tensor that the capture read has changed.
        """
        if self.graph is None:
            raise CaptureError(
                f"{self.label} was released or never captured; it cannot be replayed."
            )
        if self._constants is not None:
            for tensor in self._constants.outside:
                tensor.check(self.label)
        if self._resumed is not None:
            self._resumed.load()
        if not self.draws.is_resumed:
            self.graph.replay()
            return
        self.draws.begin_replay()
        self.graph.replay()
        self.draws.end_replay()

    def writes(self) -> AddressRanges:
        """Return all memory of its pools; a CUDA graph does not expose what its kernels write."""
        addresses = self.pool.reserved()
        return addresses if self.scratch is None else addresses | self.scratch.reserved()

    def reads(self) -> AddressRanges:
        """Return no address; a CUDA graph does not expose what its kernels read."""
        return AddressRanges()

    def release(self) -> None:
        """Destroy the graph; its pool is freed with its last graph."""
        if self.graph is not None:
            for node in self.copy_nodes:
                if node is not None:
                    node.end()
            self.graph.reset()
            self.graph = self._constants = None


class _CaptureMode(OperatorMode):
    """Intercept the operators of a capture: choose their pools and handle their host tensors.

    Args:
        label: Name of the graph in errors.
        router: Chooses the pools; None for a single pool.
        memory: Host memory of the constants.
        generator: Replaces the device's default generator.
    """

    def __init__(
        self,
        label: str,
        router: Router | None,
        memory: HostMemory,
        generator: CapturedGenerator,
    ) -> None:
        super().__init__()
        self.scratch: CUDAPool | None = None
        if router is not None:
            assert isinstance(router.scratch, CUDAPool)
            router.scratch.hold()
            self.scratch = router.scratch
        self.constants = HostConstants(label, memory)
        self.generator = generator
        self._label = label
        self._router = router

    def run_operator(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `OperatorMode`."""
        check_backward(func, args, self._label)
        self.generator.draw(func, args, kwargs)
        if self.scratch is None or self._router is None or not self._router.goes_to_scratch(func):
            return self.constants.run(func, args, kwargs)
        with self.scratch.serving_this_thread():
            return self.constants.run(func, args, kwargs)


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


class CUDABackend:
    """Capture and replay on one CUDA device.

    Args:
        device: The device; default the current one.
        memset_kernels: Whether to change captured graphs: kernels replace small memsets, and
            graphs begin with the copies to ``targets``. If this torch and its CUDA bindings cannot
            replace memsets, ``memsets_kept`` holds the reason.
    """

    name = "cuda"
    repeats_bits = False

    def __init__(self, device: torch.device | None = None, *, memset_kernels: bool = True) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.stream = torch.cuda.Stream(self.device)
        self._token = torch.zeros(1, device=self.device)
        self._sequences = Sequences(self.device)
        self._host_memory: HostMemory | None = None
        self._changes = UNCHANGED
        self.memsets_kept = ""
        if memset_kernels:
            with torch.cuda.device(self.device):
                self._prepare_changes()

    def _prepare_changes(self) -> None:
        words = torch.zeros(3, dtype=torch.int32, device=self.device)
        try:
            driver = GraphDriver()
            self._changes = GraphChanges(MemsetKernels(driver, words))
        except Exception as error:  # noqa: BLE001 - graphs work without the kernels
            self.memsets_kept = str(error) or type(error).__name__
            return
        try:
            self._changes = replace(self._changes, copies=CopyNodes(driver, words))
        except Exception as error:  # noqa: BLE001 - graphs work without the copies
            warn_of_host_copies(str(error) or type(error).__name__)

    def new_pool(self, label: str) -> CUDAPool:
        """Return a new private pool."""
        return CUDAPool(label, self.device, self.stream)

    @contextmanager
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        router: Router | None = None,
        *,
        offsets: DrawOffsets | None = None,
        resumed: Graph | None = None,
        targets: Sequence[AddressRange | None] = (),
    ) -> Iterator[CUDAGraphHandle]:
        """Stream-capture the block. See `GraphBackend.capture`."""
        assert isinstance(pool, CUDAPool)
        if self._host_memory is None:
            self._host_memory = HostMemory(is_pinned=True)
        draws = GraphDraws(label, self._own(generators), offsets, self._sequences)
        assert resumed is None or isinstance(resumed, CUDAGraphHandle)
        earlier = resumed.draws if resumed is not None else None
        if earlier is not None:
            generators = (*generators, *earlier.prepare())
        generator = CudaGenerator(label, draws, earlier, self.default_generator)
        mode = _CaptureMode(label, router, self._host_memory, generator)
        handle = CUDAGraphHandle(
            label,
            pool,
            mode.scratch,
            mode.constants,
            draws=draws,
            resumed=earlier,
            changes=self._changes,
            targets=targets,
        )
        graph = handle.graph
        assert graph is not None
        for registered in generators:
            graph.register_generator_state(registered)
        self.synchronize()
        with collector_paused(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                with (
                    private_generator(CapturedGenerator(label)),
                    saving_states(generator),
                    _lifting_from_host(),
                    mode,
                ):
                    yield handle
                generator.finish()
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
                self._changes = replace(self._changes, memset_kernels=None)
                self.memsets_kept = handle.memsets_kept
                warnings.warn(
                    f"From {label} on, memsets in graphs are not replaced by kernels, so each "
                    f"costs some microseconds ({handle.memsets_kept}). memset_kernels=False "
                    "silences this warning.",
                    stacklevel=3,
                )

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

    @property
    def default_generator(self) -> torch.Generator:
        """See `GraphBackend.default_generator`."""
        return torch.cuda.default_generators[self.device.index]

    def _own(self, generators: Sequence[torch.Generator]) -> tuple[torch.Generator, ...]:
        """Return the default generator's present sequence and ``generators``."""
        return (self.default_generator.graphsafe_get_state(), *generators)

    @contextmanager
    def measure_draws(self, generators: Sequence[torch.Generator] = ()) -> Iterator[DrawOffsets]:
        """See `GraphBackend.measure_draws`."""
        with measured_draws(self._own(generators), self.default_generator) as offsets:
            yield offsets

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

    @contextmanager
    def preserve_random_state(self, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Restore the states of the device's default generator and of ``generators`` on exit."""
        with preserve_states((self.default_generator, *generators)):
            yield

    def release_cached_memory(self) -> None:
        """Empty the allocator's cache: blocks of eager steps cannot serve a private pool.

        Also free cuBLAS's workspaces, of which there is one for each thread and stream that
        computed a product; torch allocates new ones on demand. Graphs hold addresses of
        workspaces, so none is freed if the process has any graph, including those of other owners.
        """
        self.synchronize()
        if not _graphs_exist():
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
        """Return the free bytes of the device plus those that the allocator caches."""
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)

    def raw(self, tensor: torch.Tensor) -> AddressRanges:
        """Return the addresses of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        return AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])

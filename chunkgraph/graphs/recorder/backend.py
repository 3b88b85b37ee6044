"""The CPU recorder: capture real CPU operators and replay them on the same addresses.

In a capture every operator runs and is logged, and its fresh results move into the simulated pool.
A replay runs the log again and writes each result to its captured address. Stale inputs, slots
reused too early, shared pools and forgotten state then fail as they do on a GPU. The recorder does
not model performance, streams, NCCL or the real allocator.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from chunkgraph.errors import CaptureError, ChunkGraphError
from chunkgraph.graphs.addresses import AddressRange, Pool
from chunkgraph.graphs.contract import GraphBackend
from chunkgraph.graphs.failure import capture_failure, current_location
from chunkgraph.graphs.operators import (
    computes_nothing,
    is_collective,
    replace_leaves,
    storages_written,
    tensors_in,
    wait_for_work,
)
from chunkgraph.graphs.random_state import CapturedGenerator, answering_calls, patched
from chunkgraph.graphs.recorder.legality import HostReadGuard, check_operator
from chunkgraph.graphs.recorder.recorded_graph import (
    Binding,
    External,
    Operation,
    RecordedGraph,
    TensorRef,
    owner_of,
)
from chunkgraph.graphs.recorder.simulated_pool import SimulatedPool

_aten = torch.ops.aten


def host_call(call: Callable[[], None]) -> None:
    """Run ``call`` now and, inside a recorder capture, again in every replay at this point.

    This is for host state that a CUDA graph keeps on the device, such as the current state of a
    graph-safe random generator. On a GPU nothing is recorded.

    Args:
        call: A function that must not run torch operators of the graph.
    """
    if (recording := _recording()) is not None:
        recording.log.append(call)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        call()


def is_capturing() -> bool:
    """Return whether this thread's work is captured into a graph, by the recorder or by CUDA."""
    on_device = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return on_device or _recording() is not None


def _recording() -> _RecordingMode | None:
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, _RecordingMode)), None)


class RecorderBackend(GraphBackend):
    """Capture and replay on the CPU; the module's docstring lists what is modelled.

    Args:
        limit_bytes: Maximum bytes of all pools together, like a device's memory; a capture that
            needs more fails as on a GPU. None for no limit.
        can_sleep: See `GraphBackend`.
    """

    name = "recorder"
    repeats_bits = True
    memsets_kept = ""
    default_generator = torch.default_generator

    def __init__(self, limit_bytes: int | None = None, *, can_sleep: bool = False) -> None:
        self.can_sleep = can_sleep
        self.device = torch.device("cpu")
        self._limit_bytes = limit_bytes
        self._pools: weakref.WeakSet[SimulatedPool] = weakref.WeakSet()

    def new_pool(self, label: str) -> SimulatedPool:
        """Return a new, empty simulated pool."""
        pool = SimulatedPool(label, self._take_segment)
        self._pools.add(pool)
        return pool

    @contextmanager
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        targets: Sequence[AddressRange | None] = (),
    ) -> Iterator[RecordedGraph]:
        """Log the operators inside the block. See `GraphBackend.capture`."""
        assert isinstance(pool, SimulatedPool)
        graph = RecordedGraph(label, pool, targets)
        pools = tuple(pool for pool in self._pools if not pool.is_of_caller)
        mode = _RecordingMode(graph, pools, tuple(generators))
        try:
            with (
                self.preserve_random_state(generators),
                answering_calls(mode.generator),
                HostReadGuard(label),
                # Modules choose other kernels where a mode overrides functions.
                patched(torch.overrides, "has_torch_function", lambda _: lambda _arguments: False),
                mode,
            ):
                yield graph
            mode.generator.finish()
            graph.finish(mode.log, mode.externals, mode.reads, pools)
        except ChunkGraphError:
            raise
        except Exception as error:
            raise capture_failure(label, error) from error
        finally:
            mode.restore()

    def free_bytes(self) -> int | None:
        """Return the rest of the limit; None without a limit."""
        if self._limit_bytes is None:
            return None
        awake = (pool for pool in self._pools if not pool.is_asleep)
        return self._limit_bytes - sum(pool.reserved_bytes for pool in awake)

    def _take_segment(self, num_bytes: int) -> None:
        free = self.free_bytes()
        if free is not None and num_bytes > free:
            raise torch.OutOfMemoryError(
                f"Recorder out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. The limit "
                f"is {(self._limit_bytes or 0) / 2**20:.2f} MiB, of which {free / 2**20:.2f} MiB "
                "is free."
            )


class _RecordingMode(TorchDispatchMode):
    """Record every operator of forward and backward below autograd; both run in this thread."""

    def __init__(
        self,
        graph: RecordedGraph,
        pools: tuple[SimulatedPool, ...],
        generators: tuple[torch.Generator, ...],
    ) -> None:
        super().__init__()
        self.label = graph.label
        self.pool = graph.pool
        self.pools = pools
        self.generators = generators
        self.log: list[Operation | Callable[[], None]] = []
        self.generator = CapturedGenerator(self.label)
        self.externals: list[External] = []
        # The current external memory at each address; an address can serve several in turn.
        self._current: dict[int, External] = {}
        self._pooled: set[int] = set()  # addresses that belong to a pool, permanently
        self._made: set[int] = set()  # those of them that this graph has allocated
        self.reads: list[tuple[int, int]] = []  # memory of pools that others have allocated

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        check_operator(func, args, kwargs, self.generators, self.label)
        self.generator.draw(func, args, kwargs)
        if func is _aten.lift_fresh.default:
            return self._lift(args[0])
        if func is _aten._efficientzerotensor.default:  # a zero gradient without memory
            func = _aten.zeros.default
        if _is_view(func):  # half of all operators: without memory, so a replay needs none of them
            return func(*args, **kwargs)
        # Read the arguments before the operator runs: it may change their geometry, or allocate
        # memory for an empty output.
        inputs = tensors_in(*args, *kwargs.values())
        addresses = [self._register(tensor, func) for tensor in inputs]
        refs = {
            id(tensor): TensorRef.of(tensor, self._current.get(address))
            for tensor, address in zip(inputs, addresses, strict=True)
        }
        pooled, made = self._pooled, self._made
        self.reads += [r.span for r in refs.values() if r.start in pooled and r.start not in made]
        written = storages_written(func, args, kwargs)
        for tensor in written:
            self._save(tensor)
        if is_collective(func):
            out = self._run_collective(func, args, kwargs, refs, inputs)
        else:
            out = func(*args, **kwargs)
        results = self._place(out, {*addresses})
        has_effect = any(r is not None for r in results) or written or _only_checks(func)
        if has_effect and not computes_nothing(func):
            self._log(func, args, kwargs, refs, results)
        return out

    def _run_collective(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refs: dict[int, TensorRef],
        tensors: Iterable[torch.Tensor],
    ) -> Any:
        """Run a collective to its end.

        It gets aliases of its tensors: a thread of the process group holds them for a moment after
        the collective has ended, and would keep memory of the pool in use.
        """
        binding = Binding(self.pools)
        aliases = {id(t): binding.bind(refs[id(t)]) for t in tensors}
        args, kwargs = replace_leaves((args, kwargs), torch.Tensor, lambda t: aliases[id(t)])
        originals = {id(aliases[id(t)]): t for t in tensors}
        # Some backends copy results in the caller's wait, which would be logged as well.
        out = wait_for_work(func(*args, **kwargs))
        return replace_leaves(out, torch.Tensor, lambda t: originals.get(id(t), t))

    def _lift(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record host numbers, such as those of ``torch.tensor``, as a constant of the graph."""
        constant = tensor.clone()
        results = self._place(tensor, set())
        self._log(_aten.clone.default, (constant,), {}, {id(constant): constant}, results)
        return tensor

    def _log(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: dict[int, Any],
        results: tuple[TensorRef | None, ...],
    ) -> None:
        args, kwargs = replace_leaves((args, kwargs), torch.Tensor, lambda t: leaves[id(t)])
        grad_mode = torch.is_grad_enabled()
        self.log.append(Operation(func, args, kwargs, results, current_location(), grad_mode))

    def restore(self) -> None:
        """Restore the bytes of external memory from before the capture."""
        for external in self.externals:
            if external.saved is not None and not external.alive.expired():
                external.bytes().copy_(external.saved)

    def _register(self, tensor: torch.Tensor, func: OpOverload) -> int:
        """Return the address of a tensor's storage, after recording memory that no pool owns."""
        if not tensor.is_cpu:
            # Reading device bytes by address would end the process.
            raise CaptureError(
                f"{func} got a tensor on {tensor.device}; capturing {self.label} with the "
                f"recorder, which supports only the CPU.\n  at {current_location()}\n"
                "  To do: pass backend=CUDABackend() for modules on a GPU, or move them to the CPU."
            )
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self._pooled or storage.nbytes() == 0:
            return start
        current = self._current.get(start)
        if current is not None and not current.alive.expired():
            return start
        if owner_of(self.pools, start) is not None:
            self._pooled.add(start)
            return start
        where = current_location()
        is_scalar = tensor.dim() == 0 and storage.nbytes() == tensor.itemsize
        external = External(
            start=start,
            num_bytes=storage.nbytes(),
            alive=StorageWeakRef(storage),
            first_use=f"{func} of {tuple(tensor.shape)} {tensor.dtype}"
            + (f" at {where}" if where else ""),
            constant=tensor.detach().clone() if is_scalar else None,
        )
        self._current[start] = external
        self.externals.append(external)
        return start

    def _save(self, tensor: torch.Tensor) -> None:
        external = self._current.get(tensor.untyped_storage().data_ptr())
        if external is not None and external.saved is None:
            external.saved = external.bytes().clone()

    def _place(self, out: Any, input_addresses: set[int]) -> tuple[TensorRef | None, ...]:
        """Move fresh results into the pool; return where a replay writes each result."""
        with torch._C._DisableTorchDispatch():  # every mode would cost more than the work does
            tensors = tensors_in(out)
            starts = self.pool.move(tensors, input_addresses)
            self._made.update(start for start in starts if start is not None)
            pairs = zip(tensors, starts, strict=True)
            return tuple(TensorRef.of(t) if start is not None else None for t, start in pairs)


# Cached, since torch creates schema objects per access.
@functools.cache
def _is_view(func: OpOverload) -> bool:
    """Return whether every result is a view of an argument; composite operators may copy."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func.is_view
        and all(result.alias_info is not None for result in func._schema.returns)
        and not func.has_kernel_for_dispatch_key(composite)
    )


@functools.cache
def _only_checks(func: OpOverload) -> bool:
    """Return whether an operator returns nothing, such as ``torch._assert_async``."""
    return func.namespace == "aten" and not func._schema.returns

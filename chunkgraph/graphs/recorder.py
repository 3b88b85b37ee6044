"""The CPU recorder: captures real CPU operators and replays them on the same addresses.

In a capture every operator runs and is logged; its fresh results are moved into the simulated
pool. A replay runs the log again and writes each result where the capture put it. Stale inputs,
slots reused too early, shared pools and forgotten state then fail as they do on a GPU. It is no
performance model, and streams, NCCL and the real allocator are not modelled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
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
from chunkgraph.graphs.addresses import AddressRanges
from chunkgraph.graphs.contract import Pool, Router
from chunkgraph.graphs.failure import capture_failure
from chunkgraph.graphs.legality import (
    CapturedGenerator,
    HostReadGuard,
    as_without_guard,
    as_without_modes,
    check_generator,
    check_operator,
)
from chunkgraph.graphs.location import current_location
from chunkgraph.graphs.random_state import (
    PrivateDraws,
    draw_privately,
    private_generator,
    states_put_back,
    thread_generator,
    unanswered,
)
from chunkgraph.graphs.recorded_graph import RecordedGraph, wait_for_work
from chunkgraph.graphs.recording import (
    External,
    HostCall,
    Operation,
    TensorRef,
    leaves_replaced,
    owner_of,
    storages_written,
    tensors_in,
)
from chunkgraph.graphs.simulated_pool import SimulatedPool

__all__ = ["RecorderBackend", "host_call"]

_aten = torch.ops.aten
_EVENLY_DISTRIBUTED = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0"}
_UNDEFINED_CONTENTS = ("aten::empty", "aten::new_empty")


def host_call(call: Callable[[], None]) -> None:
    """Run ``call`` now and, inside a recorder capture, again in every replay at this point.

    For host state that a CUDA graph carries on the device, such as the current state of a
    graph-safe random generator. On a GPU nothing is recorded.

    Args:
        call: takes and returns nothing; must not run torch operators that belong to the graph.
    """
    recording = next(
        (m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, _RecordingMode)),
        None,
    )
    if recording is None:
        call()
    else:
        recording.host_call(call)


class RecorderBackend:
    """Graphs on the CPU. See the module's text for what it shows and what it cannot.

    Args:
        limit_bytes: what all pools together may hold, as a device's memory would limit them; a
            capture that needs more fails as on a GPU. None: no limit.
    """

    name = "recorder"
    memsets_kept = ""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self._limit_bytes = limit_bytes
        self._pools: weakref.WeakSet[SimulatedPool] = weakref.WeakSet()

    def new_pool(self, label: str) -> SimulatedPool:
        """An empty simulated pool."""
        pool = SimulatedPool(label, self._take_segment)
        self._pools.add(pool)
        return pool

    @contextmanager
    def capture(
        self,
        label: str,
        pool: Pool,
        generators: Sequence[torch.Generator] = (),
        router: Router | None = None,
    ) -> Iterator[RecordedGraph]:
        """Log what runs inside the block. See `GraphBackend.capture`."""
        assert isinstance(pool, SimulatedPool)
        graph = RecordedGraph(label, pool)
        mode = _RecordingMode(label, pool, tuple(self._pools), tuple(generators), router)
        try:
            with (
                states_put_back(generators),
                private_generator(_RecordedGenerator(mode)),
                as_without_modes(),
                as_without_guard(),
                HostReadGuard(label),
                mode,
            ):
                yield graph
            graph.finish(mode.log, mode.externals, tuple(self._pools))
        except ChunkGraphError:
            raise
        except Exception as error:
            raise capture_failure(label, error) from error
        finally:
            mode.restore()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """There is one stream."""
        yield

    @contextmanager
    def preserve_random_state(self, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
        """Draw from a copy of the default generator, so that no other thread notices."""
        with (
            states_put_back(generators),
            private_generator(),
            as_without_modes(),
            PrivateDraws(),
        ):
            yield

    def release_cached_memory(self) -> None:
        """Nothing is kept."""

    def take_workspaces(self) -> None:
        """There are none."""

    def allocated_bytes(self) -> int:
        """Nobody counts host memory."""
        return 0

    def divisible_bytes(self) -> int:
        """Nobody counts host memory."""
        return 0

    def free_bytes(self) -> int | None:
        """What is left of the limit; None: unknown."""
        if self._limit_bytes is None:
            return None
        return self._limit_bytes - sum(pool.reserved_bytes for pool in self._pools)

    def _take_segment(self, num_bytes: int) -> None:
        free = self.free_bytes()
        if free is not None and num_bytes > free:
            raise torch.OutOfMemoryError(
                f"Recorder out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. The limit "
                f"is {(self._limit_bytes or 0) / 2**20:.2f} MiB, of which {free / 2**20:.2f} MiB "
                "is free."
            )

    def synchronize(self) -> None:
        """Nothing runs asynchronously."""

    def raw(self, tensor: torch.Tensor) -> AddressRanges:
        """The addresses of the storage behind ``tensor``."""
        storage = tensor.untyped_storage()
        return AddressRanges([(storage.data_ptr(), storage.data_ptr() + storage.nbytes())])


class _RecordedGenerator(CapturedGenerator):
    """Records that states are saved and set.

    A replay saves the state that it finds, and goes on from what was saved last, so that
    recomputation draws the numbers of its forward.
    """

    def __init__(self, recording: _RecordingMode) -> None:
        super().__init__(recording.label)
        self._recording = recording

    def get_state(self) -> torch.Tensor:
        saved = super().get_state()

        def save() -> None:
            saved.copy_(thread_generator().get_state())

        self._recording.host_call(save)
        return saved

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        generator = super().set_state(state)

        def set_saved() -> None:
            thread_generator().set_state(state)

        self._recording.host_call(set_saved)
        return generator


class _RecordingMode(TorchDispatchMode):
    """Sees every operator below autograd, forward and backward (both run in this thread)."""

    def __init__(
        self,
        label: str,
        pool: SimulatedPool,
        pools: tuple[SimulatedPool, ...],
        generators: tuple[torch.Generator, ...],
        router: Router | None,
    ) -> None:
        super().__init__()
        self.label = label
        self.pool = pool
        self.router = router
        self.pools = pools
        self.generators = generators
        self.log: list[Operation | HostCall] = []
        self.externals: list[External] = []
        self._now: dict[int, External] = {}  # by address; one address can serve several in turn
        self._pooled: set[int] = set()  # addresses known to be a pool's, which they are for good

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        check_operator(func, args, kwargs, self.label)
        check_generator(func, args, kwargs, self.generators, self.label)
        if func is _aten.lift_fresh.default:
            return self._lift(func, args[0])
        func, args = _as_recorded(func, args)
        written = storages_written(func, args, kwargs)
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        for tensor in given:
            self._meet(tensor, func)
        for tensor in written:
            self._save(tensor)
        refs = {id(t): self._ref(t) for t in given}
        args_ref = leaves_replaced(args, torch.Tensor, lambda t: refs[id(t)])
        kwargs_ref = {
            k: leaves_replaced(v, torch.Tensor, lambda t: refs[id(t)]) for k, v in kwargs.items()
        }
        # Before it runs: an output that is given without memory gets some.
        known = {t.untyped_storage().data_ptr() for t in given}
        out = draw_privately(func, args, kwargs)
        if func.namespace == "c10d":
            # Some backends copy results in the caller's wait, which would be logged as well.
            out = wait_for_work(out)
        results = self._place(out, known, self._pool_of(func))
        if any(r is not None for r in results) or written or _only_checks(func):
            fresh_only = func._schema.name.startswith(_UNDEFINED_CONTENTS)
            if not fresh_only:
                self._log(func, args_ref, kwargs_ref, results)
        return out

    def _lift(self, func: OpOverload, tensor: torch.Tensor) -> torch.Tensor:
        """Record numbers of the host, as of ``torch.tensor``, as a constant of the graph."""
        constant = tensor.clone()
        results = self._place(tensor, set(), self._pool_of(func))
        self._log(_aten.clone.default, (constant,), {}, results)
        return tensor

    def _log(self, func: OpOverload, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        grad_mode = torch.is_grad_enabled()
        self.log.append(Operation(func, args, kwargs, results, current_location(), grad_mode))

    def host_call(self, call: Callable[[], None]) -> None:
        self.log.append(HostCall(call))
        with _disable_current_modes(), torch._C.DisableTorchFunction(), unanswered():
            call()

    def restore(self) -> None:
        """Give external memory the bytes it had before the capture."""
        for external in self.externals:
            if external.saved is not None and not external.alive.expired():
                torch.empty(0, dtype=torch.uint8).set_(external.alias()).copy_(external.saved)

    def _meet(self, tensor: torch.Tensor, func: OpOverload) -> None:
        if tensor.device.type != "cpu":
            # Its bytes are read by address: of another device that ends the process.
            raise CaptureError(
                f"{func} is given a tensor on {tensor.device}; capturing {self.label} with the "
                f"recorder, which serves the CPU alone.\n  at {current_location()}\n"
                "  To do: pass backend=CUDABackend() for modules on a GPU, or move them to the CPU."
            )
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start in self._pooled or storage.nbytes() == 0:
            return
        known = self._now.get(start)
        if known is not None and not known.alive.expired():
            return
        if owner_of(self.pools, start) is not None:
            self._pooled.add(start)
            return
        where = current_location()
        external = External(
            start=start,
            num_bytes=storage.nbytes(),
            alive=StorageWeakRef(storage),
            first_use=f"{func} of {tuple(tensor.shape)} {tensor.dtype}"
            + (f" at {where}" if where else ""),
            constant=tensor.detach().clone() if tensor.dim() == 0 else None,
        )
        self._now[start] = external
        self.externals.append(external)

    def _save(self, tensor: torch.Tensor) -> None:
        external = self._now.get(tensor.untyped_storage().data_ptr())
        if external is not None and external.saved is None:
            external.saved = torch.empty(0, dtype=torch.uint8).set_(external.alias()).clone()

    def _pool_of(self, func: OpOverload) -> SimulatedPool:
        if self.router is None or not self.router.goes_to_scratch(func):
            return self.pool
        assert isinstance(self.router.scratch, SimulatedPool)
        return self.router.scratch

    def _place(
        self, out: Any, known: set[int], pool: SimulatedPool
    ) -> tuple[TensorRef | None, ...]:
        """Move fresh results into the pool; say where each result is to be written by a replay."""
        moved: dict[int, torch.UntypedStorage] = {}
        results: list[TensorRef | None] = []
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if storage.nbytes() == 0 or start in known:
                results.append(None)
                continue
            if start not in moved:
                moved[start] = pool.allocate(storage.nbytes())
                moved[start].copy_(storage)
            tensor.set_(moved[start], tensor.storage_offset(), tensor.size(), tensor.stride())
            results.append(TensorRef.of(tensor))
        return tuple(results)

    def _ref(self, tensor: torch.Tensor) -> TensorRef:
        return TensorRef.of(tensor, self._now.get(tensor.untyped_storage().data_ptr()))


def _only_checks(func: OpOverload) -> bool:
    """Whether an operator returns nothing, as of ``torch._assert_async``."""
    return func.namespace == "aten" and not func._schema.returns


def _as_recorded(func: OpOverload, args: tuple[Any, ...]) -> tuple[OpOverload, tuple[Any, ...]]:
    """What stands in the log for an operator that cannot, with the bits of eager work on a CPU."""
    if func is _aten._efficientzerotensor.default:  # a gradient that is zero, without memory
        return _aten.zeros.default, args
    if func is _aten.mul.Tensor and args[0].dtype == torch.bool:
        node = torch._C._current_autograd_node()
        if node is not None and node.name() in _EVENLY_DISTRIBUTED:
            # For a dispatch mode the gradient of a maximum is multiplied by a mask: zeros have the
            # gradient's sign then, and are NaN if it is not finite.
            return _aten.where.ScalarOther, (*args, 0.0)
    return func, args

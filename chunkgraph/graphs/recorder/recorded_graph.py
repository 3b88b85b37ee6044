"""The CPU recorder's log of a capture, by address, and its replay on these addresses.

Like a CUDA graph, the log does not keep tensors alive: it stores an operator's arguments as
addresses (`TensorRef`). Memory of a simulated pool lives as long as the pool. The owner of external
memory must keep it alive; a replay refuses to run after it is freed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs.addresses import AddressRange, AddressRanges, tensor_at
from chunkgraph.graphs.operators import (
    is_collective,
    replace_leaves,
    storages_written,
    tensors_in,
    wait_for_work,
)
from chunkgraph.graphs.recorder.simulated_pool import SimulatedPool

_keys = torch._C.DispatchKey
# Dispatch keys that precede recording, such as autograd and autocast.
_ABOVE_RECORDING = (
    torch._C._dispatch_keyset_full()
    - torch._C._dispatch_keyset_full_after(_keys.Python)
    - torch._C.DispatchKeySet(_keys.Python)
)
_copy = torch.ops.aten.copy_.default
_Step = Callable[[], None]


@dataclass(eq=False)
class External:
    """Memory outside all simulated pools that a capture reads or writes.

    Attributes:
        start: First address.
        num_bytes: Number of bytes.
        alive: Weak reference to its storage.
        first_use: The first operator that used it, and its line, for errors.
        saved: Its bytes before the capture first wrote it, or None.
        constant: Its value if it holds a single number, used as a tensor without dimensions. A
            kernel may take such a host scalar as an argument.
    """

    start: int
    num_bytes: int
    alive: StorageWeakRef
    first_use: str
    saved: torch.Tensor | None = None
    constant: torch.Tensor | None = None

    def bytes(self) -> torch.Tensor:
        """Return its bytes, as a tensor that keeps nothing alive."""
        return tensor_at(self.start, self.num_bytes, torch.device("cpu"))


class TensorRef(NamedTuple):
    """A strided view of the bytes ``[start, start + num_bytes)``; keeps no memory alive.

    ``external`` is the record of memory that no simulated pool owns. This is a tuple, since a
    capture creates several for every operator.
    """

    start: int
    num_bytes: int
    offset: int  # in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    flags: tuple[bool, bool]  # conjugate and negative bits
    external: External | None = None

    @staticmethod
    def of(tensor: torch.Tensor, external: External | None = None) -> TensorRef:
        """Return a reference to the current memory of ``tensor``."""
        storage = tensor.untyped_storage()
        return TensorRef(
            storage.data_ptr(),
            storage.nbytes(),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            (tensor.is_conj(), tensor.is_neg()),
            external,
        )

    @property
    def span(self) -> tuple[int, int]:
        """Return the first byte of the memory, and the one after the last."""
        item = self.dtype.itemsize
        first = self.start + self.offset * item
        if 0 in self.shape:
            return first, first
        last = sum(map(mul, self.shape, self.stride)) - sum(self.stride)
        return first, first + (last + 1) * item

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor with this geometry on ``storage``."""
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        tensor.set_(storage, self.offset, self.shape, self.stride)
        conj, neg = self.flags
        if conj:
            tensor = torch._conj(tensor)
        if neg:
            tensor = torch._neg_view(tensor)
        return tensor


@dataclass(frozen=True)
class Operation:
    """One logged operator.

    Attributes:
        func: The operator.
        args: Its arguments with a `TensorRef` for each tensor. A tensor that is passed twice is
            one `TensorRef` object, as some kernels require.
        kwargs: Likewise.
        results: For each tensor output, in flattening order, where a replay writes it; None for
            an output that aliases an argument (a view or an in-place result).
        where: The user's line, or None.
        grad_mode: Whether gradients were enabled, for which some kernels save more.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[TensorRef | None, ...]
    where: str | None
    grad_mode: bool


def owner_of(pools: Sequence[SimulatedPool], address: int) -> SimulatedPool | None:
    """Return the pool that contains ``address``, or None."""
    return next((pool for pool in pools if pool.owns(address)), None)


class RecordedCopy:
    """A copy at the start of a recorded graph. See `chunkgraph.graphs.contract.CopyNode`."""

    def __init__(self, target: AddressRange) -> None:
        self._target = target
        self._source = target.start

    def read(self, address: int) -> bool:
        """See `chunkgraph.graphs.contract.CopyNode`."""
        self._source = address
        return True

    def run(self) -> None:
        """Copy, unless the source is the target itself."""
        start, end = self._target.start, self._target.end
        if self._source != start:
            ctypes.memmove(start, self._source, end - start)


class RecordedGraph:
    """A recording of `RecorderBackend.capture`, which calls `finish`.

    Args:
        label: Name of the graph in errors.
        pool: Pool of the graph, kept alive by it.
        targets: See `chunkgraph.graphs.contract.GraphBackend.capture`.
    """

    def __init__(
        self, label: str, pool: SimulatedPool, targets: Sequence[AddressRange | None] = ()
    ) -> None:
        self.label = label
        self.copy_nodes = [None if t is None else RecordedCopy(t) for t in targets]
        self.pool = pool
        self._steps: list[_Step] | None = None
        self._externals: list[External] = []
        self._writes = AddressRanges()
        self._reads = AddressRanges()

    def finish(
        self,
        log: Sequence[Operation | _Step],
        externals: list[External],
        reads: Sequence[tuple[int, int]],
        pools: tuple[SimulatedPool, ...],
    ) -> None:
        """Turn the log into steps that are bound to addresses.

        Raises:
            CaptureError: External memory that the capture used is already freed.
        """
        binding = Binding(pools)
        writes: list[tuple[int, int]] = []
        steps: list[_Step] = [node.run for node in self.copy_nodes if node is not None]
        grad_mode = False  # as in `replay`
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for entry in log:
                if not isinstance(entry, Operation):
                    steps.append(entry)
                    continue
                binding.begin_operation()
                args, kwargs = replace_leaves((entry.args, entry.kwargs), TensorRef, binding.bind)
                results = [None if r is None else binding.bind(r) for r in entry.results]
                written = map(TensorRef.of, storages_written(entry.func, args, kwargs))
                writes.extend(r.span for r in (*entry.results, *written) if r is not None)
                if entry.grad_mode is not grad_mode:
                    grad_mode = entry.grad_mode
                    steps.append(partial(torch._C._set_grad_enabled, grad_mode))
                steps.append(_operation_step(entry, args, kwargs, results, self.label))
        self._steps = steps
        self._externals = [e for e in externals if e.constant is None or not e.alive.expired()]
        self._writes = AddressRanges(writes)
        self._reads = AddressRanges(reads)

    def replay(self) -> None:
        """Run the log. See `Graph.replay`.

        Raises:
            ReplayMismatchError: Memory that the graph reads or writes was freed.
        """
        if self._steps is None:
            raise CaptureError(
                f"{self.label} was released or never captured; it cannot be replayed."
            )
        for external in self._externals:
            if external.alive.expired():
                raise ReplayMismatchError(
                    f"{self.label} uses memory that has been freed since capture: "
                    f"{external.first_use}. "
                    "Update parameters and buffers in place (copy_), or release the graphs and "
                    "capture again after replacing them."
                )
        with (
            torch.no_grad(),
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(_ABOVE_RECORDING),
        ):
            for step in self._steps:
                step()

    def writes(self) -> AddressRanges:
        """Return exactly the addresses that a replay writes."""
        return self._writes

    def reads(self) -> AddressRanges:
        """Return exactly the addresses of pools that a replay reads and has not allocated."""
        return self._reads

    def release(self) -> None:
        """Drop the log and the references to external memory."""
        self._steps = None
        self._externals = []


class Binding:
    """Create tensors on recorded addresses, with one storage for each piece of memory."""

    def __init__(self, pools: tuple[SimulatedPool, ...]) -> None:
        self._pools = pools
        self._storages: dict[tuple[int, int, int], torch.UntypedStorage] = {}
        self.begin_operation()

    def begin_operation(self) -> None:
        """Forget the tensors of the previous operation."""
        self._tensors: dict[int, torch.Tensor] = {}

    def bind(self, ref: TensorRef) -> torch.Tensor:
        """Return the tensor of a reference; the same one within an operation."""
        if id(ref) not in self._tensors:
            self._tensors[id(ref)] = self._tensor(ref)
        return self._tensors[id(ref)]

    def _tensor(self, ref: TensorRef) -> torch.Tensor:
        external = ref.external
        if external is not None and external.alive.expired():
            if external.constant is None:
                raise CaptureError(
                    f"Memory that {external.first_use} used was freed before the capture ended. "
                    "A graph remembers addresses: keep such a tensor alive outside the chunk."
                )
            return external.constant  # a host scalar is part of the kernel's arguments
        key = (id(external), ref.start, ref.num_bytes)
        if key not in self._storages:
            self._storages[key] = self._storage(ref)
        return ref.tensor(self._storages[key])

    def _storage(self, ref: TensorRef) -> torch.UntypedStorage:
        if ref.num_bytes == 0:
            return torch.UntypedStorage(0)
        if ref.external is not None:
            return ref.external.bytes().untyped_storage()
        pool = owner_of(self._pools, ref.start)
        assert pool is not None, f"untracked memory at {ref.start:#x}"
        return pool.alias(ref.start, ref.num_bytes)


def _operation_step(
    entry: Operation, args: Any, kwargs: Any, results: Sequence[torch.Tensor | None], label: str
) -> _Step:
    func = entry.func
    waits = is_collective(func)

    def run() -> None:
        out = func(*args, **kwargs)
        if waits:
            wait_for_work(out)
        for target, value in zip(results, tensors_in(out), strict=True):
            if target is None:  # an output that aliases an argument
                continue
            if value.shape != target.shape:
                raise ReplayMismatchError(
                    f"{label}: {func} returns shape {tuple(value.shape)}, but "
                    f"{tuple(target.shape)} in the capture: its shape depends on values, which a "
                    f"graph cannot hold.\n  at {entry.where}\n  To do: pad to a fixed shape, or "
                    "move the line out of the chunk."
                )
            _copy(target, value)

    return run

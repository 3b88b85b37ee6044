"""The log that the CPU recorder keeps of a capture, by address.

Like a CUDA graph, the log does not keep tensors alive: an operator's arguments are remembered as
addresses (`TensorRef`). Memory of a simulated pool lives as long as the pool; external memory
must be kept by its owner, and a replay refuses to run when it is gone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.graphs.location import SourceLocation
from chunkgraph.graphs.simulated_pool import SimulatedPool

__all__ = [
    "External",
    "HostCall",
    "Operation",
    "TensorRef",
    "leaves_replaced",
    "owner_of",
    "span",
    "storages_written",
    "tensors_in",
]


@dataclass(eq=False)
class External:
    """Memory outside every simulated pool that a capture touched.

    Attributes:
        alive: tells whether its owner still has it.
        first_use: operator that touched it first and where, for the error when it is gone.
        saved: its bytes before the capture first wrote it, or None.
        constant: its value when it is a single element (a host scalar inside a kernel's arguments).
    """

    start: int
    num_bytes: int
    alive: StorageWeakRef
    first_use: str
    saved: torch.Tensor | None = None
    constant: torch.Tensor | None = None

    def alias(self) -> torch.UntypedStorage:
        """A storage on the same bytes that keeps nothing alive."""
        buffer = (ctypes.c_char * self.num_bytes).from_address(self.start)
        return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


class TensorRef(NamedTuple):
    """A strided view of the bytes ``[start, start + num_bytes)``; keeps no memory alive.

    ``external`` is the record of the memory when no simulated pool owns it. A tuple, because a
    capture makes several for every operator.
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
        """The reference to where ``tensor`` lies now."""
        storage = tensor.untyped_storage()
        return TensorRef(
            start=storage.data_ptr(),
            num_bytes=storage.nbytes(),
            offset=int(tensor.storage_offset()),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            flags=(tensor.is_conj(), tensor.is_neg()),
            external=external,
        )

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of this geometry on ``storage``."""
        made = torch.empty(0, dtype=self.dtype)
        made.set_(storage, self.offset, self.shape, self.stride)
        conj, neg = self.flags
        if conj:
            made = torch._conj(made)
        if neg:
            made = torch._neg_view(made)
        return made


@dataclass(frozen=True)
class Operation:
    """One operator: ``args`` and ``kwargs`` hold `TensorRef` in the place of tensors.

    A tensor that is several arguments is one object there, too: some kernels ask for that.

    ``results`` has one entry for each tensor output, in flattening order: where to write it, or
    None for outputs that alias an argument (views, in-place results). ``grad_mode`` is whether
    gradients were on: some kernels keep more for a backward then.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[TensorRef | None, ...]
    where: SourceLocation | None
    grad_mode: bool


@dataclass(frozen=True)
class HostCall:
    """Host work that belongs to the graph (a switch of the random state)."""

    call: Callable[[], None]


def storages_written(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    """The argument tensors that ``func`` writes, by its schema; for collectives, all of them.

    Schemas of batch normalization do not say that it updates its running statistics.
    """
    written: list[torch.Tensor] = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        written.extend(tensors_in(value))
    return written


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each; torch makes the objects of a schema anew for who looks at them."""
    collective = func.namespace == "c10d"
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if collective
        or (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")
    )


def span(tensor: torch.Tensor | TensorRef) -> tuple[int, int]:
    """First and last-plus-one byte that a strided tensor can touch."""
    if isinstance(tensor, TensorRef):
        shape, stride, start = tensor.shape, tensor.stride, tensor.start
        item = tensor.dtype.itemsize
        first = start + tensor.offset * item
    else:
        shape, stride = tuple(tensor.shape), tensor.stride()
        item = tensor.element_size()
        first = tensor.data_ptr()
    if any(n == 0 for n in shape):
        return first, first
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return first, first + (last + 1) * item


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's arguments or result, which nest in lists and tuples alone."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def leaves_replaced(value: Any, kind: type, replace: Callable[[Any], Any]) -> Any:
    """An operator's argument with ``replace`` of every leaf that is of ``kind``."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return type(value)([leaves_replaced(item, kind, replace) for item in value])
    return value


def owner_of(pools: Sequence[SimulatedPool], address: int) -> SimulatedPool | None:
    """The pool that ``address`` lies in, if any."""
    return next((pool for pool in pools if pool.owns(address)), None)

"""The CPU recorder's log of a capture, by address.

Like a CUDA graph, the log does not keep tensors alive: it stores an operator's arguments as
addresses (`TensorRef`). Memory of a simulated pool lives as long as the pool. The owner of external
memory must keep it alive; a replay refuses to run after it is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from chunkgraph.graphs.addresses import tensor_at
from chunkgraph.graphs.recorder.simulated_pool import SimulatedPool

__all__ = ["External", "Operation", "TensorRef", "owner_of"]


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
        tensor = torch.empty(0, dtype=self.dtype)
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

"""How ranks agree on the host: over gloo, or through the store of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.megatron.core.access import import_megatron

__all__ = [
    "Gather",
    "Maximum",
    "Share",
    "agree_by_maximum",
    "gather_from_data_ranks",
    "share_in_tensor_group",
    "uses_gloo",
]

_CLOSING_TIME = timedelta(seconds=2)


def agree_by_maximum() -> Maximum | None:
    """Element-wise maximum over all ranks, on the host; None for a single process.

    Makes a gloo group of its own, so every rank must call it in the same order as its other
    process groups; without gloo (see `uses_gloo`) it takes keys of the job's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if uses_gloo():
        return Maximum(dist.new_group(backend="gloo"))
    from chunkgraph.megatron.core.store_agreement import StoreMaximum

    return StoreMaximum(dist.get_world_size())


def uses_gloo() -> bool:
    """Whether Megatron may make process groups of gloo, as without ``--disable-gloo-...``."""
    state = import_megatron("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        return True
    try:
        return state.get_data_parallel_group_gloo() is not None
    except AssertionError:
        return False


def share_in_tensor_group() -> Share | None:
    """How the first of the tensor-parallel ranks tells the others; None where it is alone.

    Makes a gloo group of its own, in which every tensor-parallel rank has to take part; without
    gloo it takes keys of the job's store.
    """
    state = import_megatron("megatron.core.parallel_state")
    ranks = dist.get_process_group_ranks(state.get_tensor_model_parallel_group())
    if len(ranks) == 1:
        return None
    if uses_gloo():
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return Share(group, ranks[0])
    from chunkgraph.megatron.core.store_agreement import StoreShare

    return StoreShare(ranks)


def gather_from_data_ranks() -> Gather:
    """How the ranks that share a global batch tell each other, on the host.

    Makes a gloo group of its own where there are several, in which all of them have to take part;
    without gloo it takes keys of the job's store.
    """
    state = import_megatron("megatron.core.parallel_state")
    group = state.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Gather(None)
    if uses_gloo():
        return Gather(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    from chunkgraph.megatron.core.store_agreement import StoreGather

    return StoreGather(ranks)


class Gather:
    """Gives every rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own; None for this rank alone.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, value: Any) -> list[Any]:
        """The values of all, in the order of the group; every rank of it calls."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        """Give the group back."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


class Share:
    """Gives one rank's value to all ranks of a group, on the host.

    Args:
        group: a gloo group of its own.
        source: the global rank whose value it is.
    """

    def __init__(self, group: Any, source: int) -> None:
        self._group = group
        self._source = source

    def __call__(self, value: Any) -> Any:
        """The source's value; what the others give is not looked at."""
        values = [value]
        dist.broadcast_object_list(values, self._source, self._group, torch.device("cpu"))
        return values[0]

    def close(self) -> None:
        """Give the group back."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


class Maximum:
    """An `EarlyAgree` over a process group of its own.

    Args:
        group: a gloo group of all ranks.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._last: Any = None

    def __call__(self, values: Sequence[int]) -> list[int]:
        """Ask and wait."""
        return self.start(values)()

    def start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Ask; the result waits for the answer."""
        tensor = torch.tensor(list(values), dtype=torch.int64, device=torch.device("cpu"))
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._last = work

        def wait() -> list[int]:
            work.wait()
            return [int(value) for value in tensor]

        return wait

    def close(self) -> None:
        """Give the group back; nothing can be asked any more.

        Every step asks about the next one, so that a question is open when training ends. All
        ranks asked it, unless one of them failed; then the group is left to the process's end.
        """
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        if self._last is not None:
            try:
                self._last.wait(_CLOSING_TIME)
            except RuntimeError:
                return
        dist.destroy_process_group(group)

"""Choose how ranks agree on the host: over gloo, or through the store of the job."""

from __future__ import annotations

import torch.distributed as dist

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.gloo_agreement import Gather, Maximum, Share
from chunkgraph.megatron.core.store_agreement import StoreGather, StoreMaximum, StoreShare

__all__ = [
    "agree_by_maximum",
    "gather_from_data_ranks",
    "share_in_tensor_group",
    "uses_gloo",
]


def agree_by_maximum() -> Maximum | None:
    """Element-wise maximum over all ranks, on the host; None for a single process.

    Makes a gloo group of its own, so every rank must call it in the same order as its other
    process groups; without gloo (see `uses_gloo`) it takes keys of the job's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if uses_gloo():
        return Maximum(dist.new_group(backend="gloo"))
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
    return StoreGather(ranks)

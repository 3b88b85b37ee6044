"""Choose how ranks agree on the host: over gloo, or through the store of the job."""

from __future__ import annotations

import torch.distributed as dist

from chunkgraph.engine.decide.maximum import Maximum
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.gloo_agreement import Gather, Share
from chunkgraph.megatron.core.store_agreement import StoreGather, StoreMaximum, StoreShare

__all__ = [
    "agree_by_maximum",
    "gather_from_data_ranks",
    "share_in_tensor_group",
    "uses_gloo",
]


def agree_by_maximum() -> Maximum | None:
    """Return an element-wise maximum over all ranks, on the host; None for a single process.

    Creates a gloo group, so every rank must call this in the same order relative to its other
    process groups. Without gloo (see `uses_gloo`) the ranks agree through the job's store.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if uses_gloo():
        return Maximum(dist.new_group(backend="gloo"))
    return StoreMaximum(dist.get_world_size())


def uses_gloo() -> bool:
    """Return whether Megatron may use gloo: ``--disable-gloo-process-groups`` is not set."""
    state = import_megatron("megatron.core.parallel_state")
    if not state.model_parallel_is_initialized():
        return True
    try:
        return state.get_data_parallel_group_gloo() is not None
    except AssertionError:
        return False


def share_in_tensor_group() -> Share | None:
    """Return a broadcast from the first tensor-parallel rank; None for a group of one rank.

    Creates a gloo group, so every tensor-parallel rank must call this. Without gloo the ranks use
    the job's store.
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
    """Return a gather, on the host, among the ranks that share a global batch.

    Creates a gloo group if there are several such ranks, so all of them must call this. Without
    gloo the ranks use the job's store.
    """
    state = import_megatron("megatron.core.parallel_state")
    group = state.get_data_parallel_group(with_context_parallel=True)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return Gather(None)
    if uses_gloo():
        return Gather(dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    return StoreGather(ranks)

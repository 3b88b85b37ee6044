"""Layer specs for documents that ranks share: whole layers, and experts with split sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from user_specs import (
    ContextCore,
    _split_layer,
    _with_core,
    packed_contexts_experts,
    packed_contexts_latent_experts,
)


class _WithWholeExperts(TransformerLayer):
    """Checks that tensor-parallel ranks hold their experts as configured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        assert ranks == self.config.expert_tensor_parallel_size == 1


def experts() -> Any:
    """Return the spec of one layer of experts with `SplitNorm`, for sequence parallelism."""
    spec = packed_contexts_experts()
    spec.module = _WithWholeExperts
    return _split_layer(spec)


def latent_experts() -> Any:
    """Return `experts` with multi-latent attention."""
    return _split_layer(packed_contexts_latent_experts())


class StaticContextCore(ContextCore):
    """`ContextCore` for documents that the model's context-parallel ranks share."""

    is_static = True

    def group_of(self, packed_seq_params: Any) -> Any:
        """Return Megatron's group."""
        return parallel_state.get_context_parallel_group()


class PoisonedSplitCore(StaticContextCore):
    """Gets NaN in every row without a token, forward and backward."""

    def prepared(self, t: torch.Tensor, is_tail: torch.Tensor) -> torch.Tensor:
        """Prepare a tensor with poisoned padding."""
        return super().prepared(t.masked_fill(is_tail[:, None, None], float("nan")), is_tail)


def split() -> Any:
    """Return the local spec with `StaticContextCore`."""
    return _with_core(StaticContextCore)


def split_poisoned() -> Any:
    """Return the local spec with `PoisonedSplitCore`."""
    return _with_core(PoisonedSplitCore)


def split_latent() -> Any:
    """Return the local spec of multi-latent attention with `StaticContextCore`."""
    return _with_core(StaticContextCore, multi_latent_attention=True)


def split_experts() -> Any:
    """Return the local spec of four experts with `PoisonedSplitCore`."""
    return _with_core(PoisonedSplitCore, num_experts=4)


def static_experts() -> Any:
    """Return `experts` with `StaticContextCore`."""
    return _split_layer(_with_core(StaticContextCore, num_experts=4))


class _FaultyCore(ContextCore):
    """Reads on the host on rank 1 after collectives of two ranks, which no graph can hold."""

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> torch.Tensor:
        """Attend; see `PackedCore`."""
        mixed = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        if packed_seq_params.cp_group is not None and dist.get_rank() == 1:
            mixed.sum().item()
        return mixed


def faulty() -> Any:
    """Return the local spec with `_FaultyCore`."""
    return _with_core(_FaultyCore)

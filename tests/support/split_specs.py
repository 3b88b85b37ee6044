"""Layers of packed documents that context-parallel ranks share, named ``split_specs:function``."""

from __future__ import annotations

from typing import Any

import torch
from gathering import Gather
from megatron.core import parallel_state
from torch import nn
from user_specs import PackedCore, _with_core


class SplitCore(PackedCore):
    """`PackedCore` on the rows of all context-parallel ranks; each rank keeps its own.

    It does not use `PackedSequences.rows_of_rank`: it computes a row's place from the offsets, row
    by row.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attend with [t / C, heads, width] each; return [t / C, 1, heads * width]."""
        group = parallel_state.get_context_parallel_group()
        padded = packed_seq_params.cu_seqlens_q_padded
        if padded is None:  # documents fill all rows
            padded = packed_seq_params.cu_seqlens_q
        order = _places(padded, query.size(0), group.size())
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        whole = [Gather.apply(t, group).index_select(0, back) for t in (query, key, value)]
        mixed = super().forward(*whole, attention_mask, packed_seq_params, **options)
        own = order.chunk(group.size())[group.rank()]
        return mixed.index_select(0, own)


def _places(padded: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Return the packed places of the rows of rank 0, then of rank 1, ...; int64 [size * rows]."""
    starts, ends = padded[:-1].long(), padded[1:].long()
    rows = torch.arange(num_rows)
    document = torch.searchsorted(ends // size, rows, right=True).clamp(max=len(starts) - 1)
    within = rows - starts[document] // size
    half = (ends - starts)[document] // (2 * size)
    places = []
    for rank in range(size):
        from_front = starts[document] + rank * half + within
        from_back = ends[document] - (rank + 1) * half + (within - half)
        places.append(torch.where(within < half, from_front, from_back))
    return torch.cat(places)


class PoisonedSplitCore(SplitCore):
    """Gets NaN in every row without a token, forward and backward."""

    def prepared(self, t: torch.Tensor, is_tail: torch.Tensor) -> torch.Tensor:
        """Prepare a tensor with poisoned padding."""
        return super().prepared(t.masked_fill(is_tail[:, None, None], float("nan")), is_tail)


def split() -> Any:
    """Return the local spec with `SplitCore`."""
    return _spec(SplitCore)


def split_poisoned() -> Any:
    """Return the local spec with `PoisonedSplitCore`."""
    return _spec(PoisonedSplitCore)


def split_latent() -> Any:
    """Return the local spec of multi-latent attention with `SplitCore`."""
    return _with_core(SplitCore, multi_latent_attention=True)


def split_experts() -> Any:
    """Return the local spec of four experts with `PoisonedSplitCore`."""
    return _with_core(PoisonedSplitCore, num_experts=4)


def _spec(core: type[nn.Module]) -> Any:
    return _with_core(core)

"""Stand-ins for Transformer Engine's kernels that sort rows by expert, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def utils() -> SimpleNamespace:
    """Return the part of Megatron's ``moe_utils`` that a dispatch calls."""
    return SimpleNamespace(
        permute=permute, unpermute=unpermute, get_align_size_for_quantization=lambda _: 0
    )


def permute(
    rows: torch.Tensor, kept: torch.Tensor, probs: torch.Tensor, num_out_tokens: int, fused: bool
) -> tuple[Any, ...]:
    """Sort rows as Transformer Engine does; unwritten rows are NaN."""
    assert fused
    by_expert = kept.T.reshape(-1)
    first = by_expert.to(torch.int8).argsort(descending=True, stable=True)[:num_out_tokens]
    source = first % rows.shape[0]
    is_unwritten = ~by_expert[first]
    permuted = rows[source].masked_fill(is_unwritten[:, None], float("nan"))
    weights = probs.T.reshape(-1)[first].masked_fill(is_unwritten, float("nan"))
    return permuted, weights, (source, is_unwritten), None, None


def unpermute(
    rows: torch.Tensor, row_map: Any, restore_shape: torch.Size, fused: bool
) -> torch.Tensor:
    assert fused
    source, is_unwritten = row_map
    out = torch.zeros(restore_shape)
    return out.index_add(0, source, torch.where(is_unwritten[:, None], 0.0, rows))

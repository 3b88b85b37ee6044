"""Stand in for Transformer Engine's kernels that sort rows by expert, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def utils() -> SimpleNamespace:
    """What of Megatron's ``moe_utils`` a dispatch calls."""
    return SimpleNamespace(
        permute=permute, unpermute=unpermute, get_align_size_for_quantization=lambda _: 0
    )


def permute(
    rows: torch.Tensor, kept: torch.Tensor, probs: torch.Tensor, num_out_tokens: int, fused: bool
) -> tuple[Any, ...]:
    """As Transformer Engine's; what nobody wrote is NaN."""
    assert fused
    by_expert = kept.T.reshape(-1)
    first = by_expert.to(torch.int8).argsort(descending=True, stable=True)[:num_out_tokens]
    source = first % rows.shape[0]
    behind = ~by_expert[first]
    permuted = rows[source].masked_fill(behind[:, None], float("nan"))
    weights = probs.T.reshape(-1)[first].masked_fill(behind, float("nan"))
    return permuted, weights, (source, behind), None, None


def unpermute(
    rows: torch.Tensor, row_map: Any, restore_shape: torch.Size, fused: bool
) -> torch.Tensor:
    assert fused
    source, behind = row_map
    out = torch.zeros(restore_shape)
    return out.index_add(0, source, torch.where(behind[:, None], 0.0, rows))

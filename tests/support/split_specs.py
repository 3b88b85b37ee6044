"""Layers of packed documents that context-parallel ranks share, named ``split_specs:function``."""

from __future__ import annotations

from typing import Any

import torch
from context_specs import StaticContextCore
from user_specs import _with_core


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

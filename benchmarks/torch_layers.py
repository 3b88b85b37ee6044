"""Transformer layers of the benchmarks: torch's own modules, or Transformer Engine's."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Layer", "torch_layer", "transformer_engine_layer"]


class Layer(nn.Module):
    """A transformer layer with causal attention, normalized first.

    Args:
        qkv: normalizes, and projects to queries, keys and values.
        out: projects what attention returns.
        mlp: normalizes, and applies the MLP.
        num_heads: of attention.
    """

    def __init__(self, qkv: nn.Module, out: nn.Module, mlp: nn.Module, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp, self.num_heads = qkv, out, mlp, num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then apply the MLP."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        attended = nn.functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def torch_layer(width: int, num_heads: int) -> Layer:
    """Make a layer of torch's modules on the current device."""
    return Layer(
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)),
        nn.Linear(width, width),
        nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        ),
        num_heads,
    )


def transformer_engine_layer(width: int, num_heads: int, *, delays_weights: bool) -> Layer:
    """Make a layer of Transformer Engine's modules, without biases.

    Args:
        width: of the hidden state.
        num_heads: of attention.
        delays_weights: whether ``backward_dw`` computes the weight gradients.

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    import transformer_engine.pytorch as te

    options = {"bias": False, "delay_wgrad_compute": delays_weights}
    return Layer(
        te.LayerNormLinear(width, 3 * width, **options),
        te.Linear(width, width, **options),
        te.LayerNormMLP(width, 4 * width, **options),
        num_heads,
    )

"""Layers of torch pipelines: torch's own modules, or Transformer Engine's."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from chunkgraph.settings import ModelConfig

__all__ = ["Layer", "make_layer"]


class Layer(nn.Module):
    """A transformer layer with causal attention, normalized first.

    Args:
        qkv: normalizes, and projects to queries, keys and values.
        out: projects what attention returns.
        mlp: normalizes, and applies the MLP.
        num_heads: number of attention heads.
    """

    def __init__(self, qkv: nn.Module, out: nn.Module, mlp: nn.Module, num_heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.mlp, self.num_heads = qkv, out, mlp, num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then apply the MLP."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def make_layer(model: ModelConfig, *, delays_weights: bool) -> Layer:
    """Make a layer on the current device.

    Args:
        model: The sizes, and the kind of layer.
        delays_weights: Whether ``backward_dw`` of Transformer Engine's modules computes the weight
            gradients.
    """
    width, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads
    if model.layer_spec == "transformer_engine":
        te: Any = importlib.import_module("transformer_engine.pytorch")
        options = {"bias": False, "delay_wgrad_compute": delays_weights}
        return Layer(
            te.LayerNormLinear(width, 3 * width, **options),
            te.Linear(width, width, **options),
            te.LayerNormMLP(width, ffn, **options),
            heads,
        )
    return Layer(
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width)),
        nn.Linear(width, width),
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width)),
        heads,
    )

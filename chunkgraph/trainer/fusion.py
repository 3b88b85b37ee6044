"""Accumulate weight gradients in the weight-gradient GEMM.

Megatron's switch (``gradient_accumulation_fusion``) applies to the whole model, and its output
layer then needs an extension that no package registry has. Transformer Engine's layers need no
extension, and each layer has its own switch. So the switches are set after the model is built.
Eager and captured training then run the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from chunkgraph.errors import ConfigError

__all__ = ["fuse_weight_gradients"]

_SWITCH = "fuse_wgrad_accumulation"


def fuse_weight_gradients(chunks: Sequence[nn.Module]) -> int:
    """Make every Transformer Engine layer of ``chunks`` accumulate its weight gradient in its GEMM.

    Call this after DDP has wrapped the chunks, since the GEMM adds into ``weight.main_grad``.

    Returns:
        The number of these layers.

    Raises:
        ConfigError: There is no such layer, or a weight has no ``main_grad``.
    """
    layers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, _SWITCH)]
    if not layers:
        raise ConfigError(
            "gradient_accumulation_fusion is on, but no layer supports it: use Transformer "
            "Engine's layers (model.layer_spec=transformer_engine), or turn it off."
        )
    for layer in layers:
        for name, weight in layer.named_parameters(recurse=False):
            if weight.requires_grad and not hasattr(weight, "main_grad"):
                raise ConfigError(
                    f"gradient_accumulation_fusion is on, but {type(layer).__name__}.{name} has no "
                    "main_grad to accumulate into: wrap the model in DDP, or turn it off."
                )
    for layer in layers:
        setattr(layer, _SWITCH, True)
    return len(layers)

"""Weight gradients accumulated by the weight-gradient GEMM itself.

Megatron's switch (``gradient_accumulation_fusion``) is one for the whole model, and its output
layer then asks for an extension that no registry has. Transformer Engine's layers need no
extension: each decides for itself when it runs, so they are switched on one by one after the
model is built. Eager and captured training then run the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from chunkgraph.errors import ConfigError

__all__ = ["fuse_weight_gradients"]

_SWITCH = "fuse_wgrad_accumulation"


def fuse_weight_gradients(chunks: Sequence[nn.Module]) -> int:
    """Let every Transformer Engine layer of ``chunks`` add its weight gradient in its GEMM.

    Call it after DDP has wrapped the chunks: the GEMM adds into ``weight.main_grad``.

    Returns:
        The number of layers switched on.

    Raises:
        ConfigError: there is no such layer, or a weight has no ``main_grad``.
    """
    layers = [m for chunk in chunks for m in chunk.modules() if hasattr(m, _SWITCH)]
    if not layers:
        raise ConfigError(
            "gradient_accumulation_fusion is on, but no layer can do it: use Transformer Engine's "
            "layers (model.layer_spec=transformer_engine), or turn it off."
        )
    for layer in layers:
        for name, weight in layer.named_parameters(recurse=False):
            if weight.requires_grad and not hasattr(weight, "main_grad"):
                raise ConfigError(
                    f"gradient_accumulation_fusion is on, but {type(layer).__name__}.{name} has no "
                    "main_grad to accumulate into: set use_ddp=true, or turn it off."
                )
    for layer in layers:
        setattr(layer, _SWITCH, True)
    return len(layers)

"""Build Megatron's optimizer from a configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.settings import Config

__all__ = ["build_optimizer", "zero_gradients"]


def build_optimizer(config: Config, chunks: list[nn.Module]) -> Any:
    """Return ``get_megatron_optimizer``'s Adam with gradient clipping over all stages."""
    optimizers = import_megatron("megatron.core.optimizer")
    bf16 = config.model.params_dtype == "bfloat16"
    optimizer = optimizers.get_megatron_optimizer(
        optimizers.OptimizerConfig(
            optimizer="adam",
            lr=config.train.lr,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=config.train.use_distributed_optimizer,
        ),
        chunks,
    )
    transformer_config: Any = chunks[0].config
    transformer_config.grad_scale_func = optimizer.scale_loss
    return optimizer


def zero_gradients(chunks: list[nn.Module], optimizer: Any) -> None:
    """Reset the last step's gradients in DDP's buffers and in the parameters."""
    for chunk in chunks:
        zero_buffers = getattr(chunk, "zero_grad_buffer", None)
        if zero_buffers is not None:
            zero_buffers()
    optimizer.zero_grad()

"""Adapters of peft on Megatron's linear layers, which return their bias with their product.

peft's own class for these layers (``megatron_config``) cannot be used: release 0.21 raises KeyError
'fan_in_fan_out' when it makes one.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import nn

LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class _Adapted(Linear):
    """A linear layer of one tensor-parallel rank with adapters."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result, bias = self.base_layer(x, *args, **kwargs)
        for name in self.active_adapters if not self.merged else ():
            down, up = self.lora_A[name], self.lora_B[name]
            result = result + up(down(self.lora_dropout[name](x))) * self.scaling[name]
        return result, bias


def merge(chunks: list[nn.Module], *, is_undone: bool = False) -> None:
    """Add all adapters to the weights, or subtract them again."""
    for layer in (m for chunk in chunks for m in chunk.modules() if isinstance(m, _Adapted)):
        layer.unmerge() if is_undone else layer.merge()


def add_adapters(chunk: nn.Module) -> None:
    """Freeze a chunk, and give its layers adapters that change results."""
    config = LoraConfig(r=2, target_modules=LAYERS, lora_dropout=0.1, init_lora_weights=False)
    config._register_custom_module(
        dict.fromkeys([ColumnParallelLinear, RowParallelLinear], _Adapted)
    )
    inject_adapter_in_model(config, chunk)

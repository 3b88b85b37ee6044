"""Linear layers that delay their weight gradients, as Transformer Engine's do, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from delaying import Delays, Product, Store
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class _Delaying(Delays):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wgrad_store = Store(self.config.delay_wgrad_compute)
        if self.config.delay_wgrad_compute:
            self.weight.skip_backward_post_hook = True

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the product, and the bias unless it is added here."""
        out = Product.apply(self, x, self.weight)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Take a hook of DDP."""
        self.hooks_after_wgrad.append(hook)


class DelayingColumn(_Delaying, ColumnParallelLinear):
    """A column-parallel layer of one tensor-parallel rank."""


class DelayingRow(_Delaying, RowParallelLinear):
    """A row-parallel layer of one tensor-parallel rank."""


class FusingColumn(DelayingColumn):
    """The same layer, which adds its weight gradient to ``main_grad``."""

    adds_to_main_grad = True


class FusingRow(DelayingRow):
    """The same layer, which adds its weight gradient to ``main_grad``."""

    adds_to_main_grad = True


def delaying(column: Any = DelayingColumn, row: Any = DelayingRow) -> Any:
    """Return the local spec with layers that delay if the config requests it."""
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention.submodules
    mlp = spec.submodules.mlp
    mlp = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    mlp.linear_fc1, mlp.linear_fc2 = column, row
    return spec


def fusing() -> Any:
    """Return the same spec with layers that add to ``main_grad``."""
    return delaying(FusingColumn, FusingRow)


delaying_layer = delaying()
"""The same, as Megatron's ``--spec`` takes it."""

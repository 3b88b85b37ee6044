"""Linear layers that delay their weight gradients, as Transformer Engine's do, on a CPU."""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class _Store:
    """Stands for Transformer Engine's WeightGradStore."""

    def __init__(self, is_enabled: bool) -> None:
        self.context: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        self._is_enabled = is_enabled

    def delay_wgrad_compute(self) -> bool:
        return self._is_enabled

    def enable_delay_wgrad_compute(self) -> None:
        self._is_enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self._is_enabled = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2), x.flatten(0, -2)
        if not ctx.layer.wgrad_store.delay_wgrad_compute():
            gradient = rows[0].t() @ rows[1]
            if ctx.layer.adds_to_main_grad:
                weight.main_grad.add_(gradient)
                weight.grad_added_to_main_grad = True
                gradient.fill_(torch.nan)
            return None, grad @ weight, gradient
        ctx.layer.wgrad_store.context.put(rows)
        if not ctx.layer.adds_to_main_grad:
            return None, grad @ weight, None
        weight.grad_added_to_main_grad = True
        return None, grad @ weight, torch.full_like(weight, torch.nan)


class _Delaying:
    adds_to_main_grad = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wgrad_store = _Store(self.config.delay_wgrad_compute)
        self.hooks_after_wgrad: list[Callable[[], None]] = []
        if self.config.delay_wgrad_compute:
            self.weight.skip_backward_post_hook = True

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Return the product, and the bias unless it is added here."""
        out = _Product.apply(self, x, self.weight)
        if self.skip_bias_add or self.bias is None:
            return out, self.bias
        return out + self.bias, None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Take a hook of DDP."""
        self.hooks_after_wgrad.append(hook)

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward."""
        if not self.wgrad_store.delay_wgrad_compute():
            return
        grad, x = self.wgrad_store.context.get_nowait()
        if self.adds_to_main_grad:
            self.weight.main_grad.add_(grad.t() @ x)
        else:
            self.weight.grad = grad.t() @ x
        for hook in self.hooks_after_wgrad:
            hook()


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

"""What a linear layer needs to delay its weight gradient, as Transformer Engine's do, on a CPU."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import torch


class Store:
    """Stands for Transformer Engine's WeightGradStore."""

    def __init__(self, is_enabled: bool) -> None:
        self.context: queue.Queue[tuple[torch.Tensor, torch.Tensor]] = queue.Queue()
        self._is_enabled = is_enabled
        # Not a number, which a session would put back.
        self.switched_off: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def delay_wgrad_compute(self) -> bool:
        return self._is_enabled

    def enable_delay_wgrad_compute(self) -> None:
        self._is_enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        self._is_enabled = False
        self.switched_off.put(True)


class Product(torch.autograd.Function):
    """Keeps the inputs of the weight gradient of a layer that delays it."""

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


class Delays:
    """A layer whose forward is a `Product`; it has a ``weight`` and a ``wgrad_store``."""

    adds_to_main_grad = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hooks_after_wgrad: list[Callable[[], None]] = []

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward."""
        if not self.wgrad_store.delay_wgrad_compute():
            return
        grad, x = self.wgrad_store.context.get_nowait()
        if self.adds_to_main_grad:
            self.weight.main_grad.add_(grad.t() @ x)
        else:
            self.weight.grad = grad.t() @ x  # replaces the sum
        for hook in self.hooks_after_wgrad:
            hook()

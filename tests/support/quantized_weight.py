"""A quantized weight without Transformer Engine: a tensor without memory that holds plain ones.

As in Transformer Engine, a transpose is made when it is first needed, and an attribute of the
tensor marks it as outdated.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

_WIDTH = 16


class QuantizedWeight(torch.Tensor):
    """A matrix of 8-bit integers and a scale."""

    _data: torch.Tensor
    _scale_inv: torch.Tensor
    _transpose: torch.Tensor | None
    _transpose_invalid: bool

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale_inv: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, dtype=torch.float32, device=data.device
        )
        made._data, made._scale_inv = data, scale_inv
        made._transpose, made._transpose_invalid = None, True
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        """Return the quantized ``values``."""
        data = torch.zeros(values.shape, dtype=torch.int8, device=values.device)
        made = cls(data, torch.ones((), device=values.device))
        made.quantize_(values)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        plain = [a.dequantize() if isinstance(a, QuantizedWeight) else a for a in args]
        return func(*plain, **(kwargs or {}))

    def detach(self) -> Self:
        made = type(self)(self._data, self._scale_inv)
        made._transpose, made._transpose_invalid = self._transpose, self._transpose_invalid
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0, device=self.device)

    def dequantize(self) -> torch.Tensor:
        return self._data.float() * self._scale_inv

    def quantize_(self, values: torch.Tensor) -> None:
        """Write ``values`` in place; the transpose is outdated then."""
        scale_inv = values.abs().max() / 120
        self._scale_inv.copy_(scale_inv)
        self._data.copy_((values / scale_inv).round().to(torch.int8))
        self._transpose_invalid = True

    def update_usage(self, *, rowwise_usage: bool, columnwise_usage: bool) -> None:
        assert rowwise_usage
        if columnwise_usage and self._transpose_invalid:
            transpose = self._data.t().contiguous()
            if self._transpose is None:
                self._transpose = transpose
            else:
                self._transpose.copy_(transpose)
            self._transpose_invalid = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize().t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        return grad @ (weight._transpose.float() * weight._scale_inv).t(), grad.t() @ x


class Quantized(nn.Module):
    """Two layers with quantized weights, and plain biases."""

    width = _WIDTH

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(1)
        for name in ("first", "second"):
            weight = QuantizedWeight.of(torch.randn(_WIDTH, _WIDTH, device=device) / 4)
            self.register_parameter(name, nn.Parameter(weight))
            self.register_parameter(
                f"{name}_bias", nn.Parameter(torch.zeros(_WIDTH, device=device))
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(_Product.apply(x, self.first) + self.first_bias)
        return _Product.apply(x, self.second) + self.second_bias

    def update(self) -> None:
        """Take a step of an optimizer, which writes the weights and their transposes in place."""
        with torch.no_grad():
            for parameter in self.parameters():
                if isinstance(parameter, QuantizedWeight):
                    parameter.quantize_(parameter.dequantize() - 0.1 * parameter.grad)
                    parameter.update_usage(rowwise_usage=True, columnwise_usage=True)
                else:
                    parameter.sub_(0.1 * parameter.grad)
        self.zero_grad(set_to_none=True)

"""Poison, such as NaN, in padding: in inputs, outputs and gradients of layers."""

from __future__ import annotations

from typing import Any

import torch


class Poisoned(torch.autograd.Function):
    """The identity, with a poisoned gradient in the tail."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, tail: torch.Tensor, poison: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tail, poison)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _filled(grad, *ctx.saved_tensors), None, None


class Poison:
    """Poisons inputs of Mamba layers, outputs of their mixers, and both gradients.

    Attributes:
        value: number for all rows of the tail, on the chunk's device, so that replays read it.
    """

    def __init__(self, chunk: Any) -> None:
        for hook in (Poison._enter, Poison._mixed, Poison._leave):
            hook.__module__ = "chunkgraph"  # attach() refuses unknown hooks
        self.value = torch.full((), float("nan"), device=next(chunk.parameters()).device)
        for layer in chunk.modules():
            if type(layer).__name__ == "MambaLayer":
                layer.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
                layer.mixer.register_forward_hook(self._mixed, with_kwargs=True)
                layer.register_forward_hook(self._leave, with_kwargs=True)

    @staticmethod
    def _tail(kwargs: dict[str, Any], like: torch.Tensor) -> torch.Tensor:
        end = kwargs["packed_seq_params"].cu_seqlens_q[-1]
        return (torch.arange(like.size(0), device=like.device) >= end)[:, None, None]

    def _enter(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden = kwargs.pop("hidden_states", args[0] if args else None)
        return (_filled(hidden, self._tail(kwargs, hidden), self.value),), kwargs

    def _mixed(self, _: Any, _args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        output, bias = result
        return _filled(output, self._tail(kwargs, output), self.value), bias

    def _leave(self, _: Any, _args: Any, kwargs: dict[str, Any], result: torch.Tensor) -> Any:
        return Poisoned.apply(result, self._tail(kwargs, result), self.value)


def _filled(rows: torch.Tensor, where: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Fill masked rows with a number that the host does not read."""
    return torch.where(where, value.to(rows.dtype), rows)

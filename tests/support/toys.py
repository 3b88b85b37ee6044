"""Small chunks, and training steps of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from chunkgraph.graphs import GraphBackend

__all__ = ["SYNC_LINE", "Tower", "add_to_main_grads", "sample", "towers", "train_microbatch"]


class Tower(nn.Module):
    """Has dropout and a buffer updated in place; ``syncs``: reads the device from the host."""

    def __init__(self, *, syncs: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("num_calls", torch.zeros(()))
        self.syncs = syncs

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_calls += 1
        h = self.linear(self.dropout(x))
        if self.syncs and h.abs().max().item() > 1e9:
            h = h / 2
        return h * scale


SYNC_LINE = rf"toys\.py:{Tower.forward.__code__.co_firstlineno + 3}"
"""A pattern for the file and line of the read."""


def towers(backend: GraphBackend, *syncs: bool) -> list[Tower]:
    """Make a tower for each of ``syncs``, from one seed."""
    torch.manual_seed(4)
    return [Tower(syncs=s).to(backend.device) for s in syncs]


def sample(backend: GraphBackend, rows: int = 4) -> torch.Tensor:
    """Draw the input (rows, 8) of a tower."""
    return torch.randn(rows, 8, device=backend.device, requires_grad=True)


def train_microbatch(call: Callable[..., Any], x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Run forward and backward of one microbatch; return a copy of its output."""
    y = call(x, **kwargs)
    y.square().sum().backward()
    return y.detach().clone()


def add_to_main_grads(module: nn.Module) -> None:
    """Give trained parameters a ``main_grad`` that gradients go to, as Megatron's DDP does."""
    for parameter in (p for p in module.parameters() if p.requires_grad):
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_into_main_grad)


def _into_main_grad(parameter: torch.Tensor) -> None:
    if not getattr(parameter, "grad_added_to_main_grad", False):
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None

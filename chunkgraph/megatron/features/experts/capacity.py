"""The room that experts have for tokens, changed between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["factor_for_all", "set_capacity_factor"]

_FACTOR = "moe_expert_capacity_factor"
_SHY = 1 - 1e-9
"""Megatron rounds an expert's rows up: a product with an upward rounding error would give one row
more than there are tokens, which the router cannot fill."""


def factor_for_all(num_experts: int, top_k: int) -> float:
    """Return the capacity factor with which an expert has room for exactly all tokens.

    It holds up to a billion tokens. ``num_experts / top_k`` itself gives a row too many for some
    numbers, such as 6 of 160 experts and 448 tokens.
    """
    return num_experts / top_k * _SHY


def set_capacity_factor(layers: Sequence[Any], factor: float) -> None:
    """Give the experts of ``layers`` room for ``factor`` times their share of the tokens.

    Existing graphs of these layers keep their captured room.
    """
    for layer in layers:
        parts = (layer, layer.router, layer.token_dispatcher, layer.experts)
        for config in {id(p.config): p.config for p in parts if hasattr(p, "config")}.values():
            setattr(config, _FACTOR, factor)
        if hasattr(layer.token_dispatcher, _FACTOR):
            setattr(layer.token_dispatcher, _FACTOR, factor)

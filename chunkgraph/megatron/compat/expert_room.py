"""The room that experts have for tokens, changed between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["set_capacity_factor"]

_FACTOR = "moe_expert_capacity_factor"


def set_capacity_factor(layers: Sequence[Any], factor: float) -> None:
    """Let the experts of ``layers`` have room for ``factor`` times their share of the tokens.

    Graphs that hold these layers keep the room that they were captured with.
    """
    for layer in layers:
        parts = (layer, layer.router, layer.token_dispatcher, layer.experts)
        for config in {id(p.config): p.config for p in parts if hasattr(p, "config")}.values():
            setattr(config, _FACTOR, factor)
        if hasattr(layer.token_dispatcher, _FACTOR):
            setattr(layer.token_dispatcher, _FACTOR, factor)

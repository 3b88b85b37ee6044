"""The room of experts for tokens, and ways to increase it, by the kind of dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from chunkgraph.megatron.features.experts.counts import LOAD_OF

__all__ = ["ExpertRoom", "RoomWords", "SharedOut", "factor_for_all", "set_capacity_factor"]

_FACTOR = "moe_expert_capacity_factor"
_HEADROOM = 1.1
"""Room after tokens were dropped, as a multiple of the load."""
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


@dataclass(frozen=True)
class RoomWords:
    """Texts about a lack of room.

    Attributes:
        lacked: The lack of room, as the start of a sentence.
        counted: The counted events, in the plural.
        advice: The remedy.
    """

    lacked: str
    counted: str
    advice: str


class ExpertRoom(Protocol):
    """The room of the experts of one rank."""

    words: RoomWords

    def for_all(self) -> AbstractContextManager[None]:
        """Let an eager step drop no token."""

    def give(self, load: int) -> None:
        """Make room for the heaviest load, per `LOAD_OF` tokens on a rank, from now on."""


class SharedOut:
    """Room with a capacity factor and padding: the same for every expert.

    Args:
        layers: Expert layers.
    """

    words = RoomWords(
        "Experts had no room for tokens",
        "tokens without room at an expert",
        "raise moe_expert_capacity_factor; num_moe_experts / moe_router_topk has room for all. "
        "token_drops='count' lets training go on and counts them.",
    )

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """See `ExpertRoom`."""
        config = self._layers[0].config if self._layers else None
        before = config.moe_expert_capacity_factor if config is not None else 0.0
        if config is not None:
            enough = factor_for_all(config.num_moe_experts, config.moe_router_topk)
            set_capacity_factor(self._layers, enough)
        try:
            yield
        finally:
            if config is not None:
                set_capacity_factor(self._layers, before)

    def give(self, load: int) -> None:
        """See `ExpertRoom`; the load is of one expert, minus one token."""
        if not self._layers:
            return
        config = self._layers[0].config
        share = LOAD_OF * config.moe_router_topk / config.num_moe_experts
        enough = factor_for_all(config.num_moe_experts, config.moe_router_topk)
        # Never less than before: shapes may have changed since the tokens were counted.
        factor = max(load / share * _HEADROOM, config.moe_expert_capacity_factor)
        set_capacity_factor(self._layers, min(factor, enough))

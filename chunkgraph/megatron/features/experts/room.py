"""The room of experts for tokens or rows: all of them, a measured load plus a margin, or a budget.

Experts with a capacity have the user's factor; after a lack of room, the load of the step that ran
again. Rows between ranks have the heaviest load of the eager steps so far, at least the user's
budget (``moe_expert_rank_capacity_factor``). With all experts on one rank their number is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from chunkgraph.megatron.features.experts.counts import LOAD_OF
from chunkgraph.megatron.rules.experts import balances_by, uses_dropless

__all__ = [
    "CapacityRoom",
    "RowRoom",
    "factor_for_all",
    "is_bounded",
    "may_lack_room",
    "what_lacks_room",
]

_FACTOR = "moe_expert_capacity_factor"
_SHY = 1 - 1e-9
"""Megatron rounds an expert's rows up: a product with an upward rounding error would give one row
more than there are tokens, which the router cannot fill."""
_CAPACITY_MARGIN = 0.1
_MARGIN = 0.2
"""Additional room, as a share of the heaviest load."""
_MOST_DOUBLED = 2
_ALIGNED_ROWS = 8


def factor_for_all(num_experts: int, top_k: int) -> float:
    """Return the capacity factor with which an expert has room for exactly all tokens.

    It holds up to a billion tokens. ``num_experts / top_k`` itself gives a row too many for some
    numbers, such as 6 of 160 experts and 448 tokens.
    """
    return num_experts / top_k * _SHY


def is_bounded(config: Any) -> bool:
    """Return whether the experts of ``config`` have limited room for rows of other ranks."""
    ranks = getattr(config, "expert_model_parallel_size", None) or 1
    return uses_dropless(config) and ranks > 1


def may_lack_room(config: Any) -> bool:
    """Return whether steps with dropless experts may have to run again."""
    return is_bounded(config) or (uses_dropless(config) and balances_by("sinkhorn", config))


def what_lacks_room(config: Any) -> str:
    """Name the counted events, in the plural."""
    if not uses_dropless(config):
        return "tokens without room at an expert"
    rows, rounds = is_bounded(config), balances_by("sinkhorn", config)
    return " or ".join(
        [
            *(["dispatches without room for all rows"] if rows else []),
            *(["routers without enough rounds of Sinkhorn"] if rounds else []),
        ]
    )


class CapacityRoom:
    """Room with a capacity factor and padding: the same for every expert.

    Args:
        layers: Expert layers; at least one.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = tuple(layers)
        self._config = layers[0].config
        self._enough = factor_for_all(self._config.num_moe_experts, self._config.moe_router_topk)

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Let an eager step drop no token."""
        before = self._config.moe_expert_capacity_factor
        self._set(self._enough)
        try:
            yield
        finally:
            self._set(before)

    def give(self, load: int) -> None:
        """Make room for the heaviest load of one expert, minus one token, per `LOAD_OF` tokens."""
        share = LOAD_OF * self._config.moe_router_topk / self._config.num_moe_experts
        # Never less than before: shapes may have changed since the tokens were counted.
        before = self._config.moe_expert_capacity_factor
        self._set(min(max(load / share * (1 + _CAPACITY_MARGIN), before), self._enough))

    def _set(self, factor: float) -> None:
        """Set the capacity factor; existing graphs keep their captured room."""
        for layer in self._layers:
            parts = (layer, layer.router, layer.token_dispatcher, layer.experts)
            for config in {id(p.config): p.config for p in parts if hasattr(p, "config")}.values():
                setattr(config, _FACTOR, factor)
            if hasattr(layer.token_dispatcher, _FACTOR):
                setattr(layer.token_dispatcher, _FACTOR, factor)


class RowRoom:
    """Room for rows in a piece or in a rank's experts; the same on all ranks.

    There is room for all outside of captures and before a load is known.

    Args:
        config: Megatron's config.

    Attributes:
        is_measured: Whether eager steps measure the room: ranks exchange rows, without a budget.
        is_limited: Whether passes have this room only, as in captures.
    """

    def __init__(self, config: Any) -> None:
        budget = getattr(config, "moe_expert_rank_capacity_factor", None) or 0.0
        # With all experts on one rank a budget has no meaning, and nothing would report its lack.
        self._budget = budget * config.moe_router_topk if is_bounded(config) else 0.0
        self.is_measured = is_bounded(config) and not self._budget
        self._heaviest = 0  # of any rank
        self._num_grown = 0
        self.is_limited = False

    @property
    def factor(self) -> float:
        """Return the rows per token, infinite for all."""
        doubled = 2 ** min(self._num_grown, _MOST_DOUBLED)
        measured = self._heaviest / LOAD_OF * (1 + _MARGIN * doubled)
        return max(self._budget, measured) or math.inf

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Limit the rows of captured passes."""
        self.is_limited = True
        try:
            yield
        finally:
            self.is_limited = False

    def rows(self, num_tokens: int, most: int) -> int:
        """Return the room for a microbatch of ``num_tokens``, at most ``most`` rows."""
        if not self.is_limited:
            return most
        rows = int(min(num_tokens * self.factor, most)) + 1
        return min(most, rows + -rows % _ALIGNED_ROWS)

    def add_load(self, load: int) -> None:
        """Give the next capture room for ``load``, per `LOAD_OF` tokens, plus the margin."""
        self._heaviest = max(self._heaviest, load)

    def give(self, load: int) -> None:
        """Make room for ``load``; double the margin, as captures are rare, and loads drift."""
        self.add_load(load)
        self._num_grown += 1

"""How much room experts have for tokens, and how they are given more, by the way of dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from chunkgraph.megatron.features.experts.capacity import factor_for_all, set_capacity_factor
from chunkgraph.megatron.features.experts.counts import LOAD_OF
from chunkgraph.megatron.features.experts.rank_budget import RankBudget, rank_factor_for_all

__all__ = ["ExpertRoom", "RankRoom", "RoomWords", "SharedOut"]

_HEADROOM = 1.1
"""Room given after tokens were dropped, as a multiple of what would have done."""


@dataclass(frozen=True)
class RoomWords:
    """What users are told about it.

    Attributes:
        lacked: that there was no room, as the start of a sentence.
        counted: what is counted, with its verb.
        advice: what to do.
    """

    lacked: str
    counted: str
    advice: str


class ExpertRoom(Protocol):
    """The room of the experts of one rank."""

    words: RoomWords

    def for_all(self) -> AbstractContextManager[None]:
        """Inside, an eager step drops no token."""

    def give(self, load: int) -> None:
        """From now on there is room for the heaviest load, of `LOAD_OF` tokens on a rank."""


class SharedOut:
    """Every expert has the same fixed room (capacity factor and padding).

    Args:
        layers: of experts.
    """

    words = RoomWords(
        "Experts had no room for tokens",
        "tokens found no room at an expert",
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
        """See `ExpertRoom`; the tokens that chose one expert, but for one."""
        if not self._layers:
            return
        config = self._layers[0].config
        share = LOAD_OF * config.moe_router_topk / config.num_moe_experts
        enough = factor_for_all(config.num_moe_experts, config.moe_router_topk)
        # Never less than before: shapes may have changed since the tokens were counted.
        wanted = max(load / share * _HEADROOM, config.moe_expert_capacity_factor)
        set_capacity_factor(self._layers, min(wanted, enough))


class RankRoom:
    """The experts of a rank share a fixed number of rows (DeepEP with a budget).

    Args:
        budget: of the layers here.
        config: Megatron's.
    """

    words = RoomWords(
        "Expert-parallel ranks had no room for tokens (moe_expert_rank_capacity_factor)",
        "dispatches were over the ranks' budget",
        "raise moe_expert_rank_capacity_factor, or say token_drops='rerun', which runs such a "
        "step anew and then gives more room.",
    )

    def __init__(self, budget: RankBudget, config: Any) -> None:
        self._budget = budget
        self._config = config

    def for_all(self) -> AbstractContextManager[None]:
        """See `ExpertRoom`."""
        return self._budget.room_for_all()

    def give(self, load: int) -> None:
        """See `ExpertRoom`; the rows that were wanted of one rank."""
        config = self._config
        now = config.moe_expert_rank_capacity_factor
        wanted = load / (LOAD_OF * config.moe_router_topk) * _HEADROOM
        enough = rank_factor_for_all(
            config.num_moe_experts, config.moe_router_topk, config.expert_model_parallel_size
        )
        self._budget.set_factor(max(now, min(wanted, enough)))

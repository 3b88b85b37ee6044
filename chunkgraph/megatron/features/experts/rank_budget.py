"""DeepEP with a fixed number of rows for each expert-parallel rank: HybridEP, or within a node.

The input of a rank's experts is allocated at that size, and the host reads nothing. Rows that
exceed it are omitted, with a flag on the device. This module counts the flags, inside the graphs,
so that such a step can be refused or run again, and measures the rows that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.counts import DropCounts, HeaviestLoad
from chunkgraph.megatron.features.experts.hybrid_ep import manager_of, overflow_of
from chunkgraph.megatron.features.experts.worst_case_dispatch import (
    WorstCaseManager,
    use_worst_case_dispatch,
)

__all__ = [
    "RankBudget",
    "flex_backend",
    "knows_rank_budget",
    "rank_factor_for_all",
    "uses_rank_budget",
]

_CONFIG = "megatron.core.transformer.transformer_config"
_FACTOR = "moe_expert_rank_capacity_factor"
_BACKENDS = ("hybridep", "deepep")


def knows_rank_budget() -> bool:
    """Return whether this release of Megatron has a fixed budget of a rank (0.18 and later)."""
    config = import_megatron(_CONFIG).TransformerConfig
    return _FACTOR in getattr(config, "__dataclass_fields__", {})


def flex_backend(config: Any) -> str | None:
    """Return the flex backend in Megatron's config or arguments; None without flex dispatch."""
    if not getattr(config, "num_moe_experts", None):
        return None
    if getattr(config, "moe_token_dispatcher_type", None) != "flex":
        return None
    return getattr(config, "moe_flex_dispatcher_backend", None) or "deepep"  # Megatron's default


def uses_rank_budget(config: Any) -> bool:
    """Return whether Megatron's ``config`` selects one of DeepEP's backends with a budget."""
    return flex_backend(config) in _BACKENDS and getattr(config, _FACTOR, None) is not None


def rank_factor_for_all(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the budget's factor with which a rank has room for every token of all ranks.

    Each of the ``num_ranks`` ranks sends a token at most once to each expert of a rank.
    """
    return num_ranks * min(top_k, num_experts // num_ranks) / top_k


class RankBudget:
    """Counts on the device the dispatches that exceeded the budget of this rank.

    It counts in graphs and in eager training passes. Passes without gradients that are not captured
    get room for all rows, since nothing would report a flag there; HybridEP then waits for the
    device.

    Args:
        layers: Expert layers, all with the same one of DeepEP's two dispatchers; at least one.

    Attributes:
        counts: Dispatches over the budget, by layer.
        layers: Layer numbers, from 1.
        load: Rows that a microbatch sent to this rank, if measured.
        restore_managers: Restores Megatron's managers, if they were replaced.

    Raises:
        ConfigError: A layer has an unexpected dispatcher.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._is_hybrid = layers[0].config.moe_flex_dispatcher_backend == "hybridep"
        self.restore_managers: Callable[[], None] = lambda: None
        if not self._is_hybrid:
            self.restore_managers = use_worst_case_dispatch(layers)
        kind = None if self._is_hybrid else WorstCaseManager
        self._managers: list[Any] = [manager_of(layer, kind) for layer in layers]
        self.counts = DropCounts(len(layers), next(layers[0].parameters()).device)
        self.load = HeaviestLoad()
        self.layers = tuple(int(layer.layer_number or 0) for layer in layers)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured forward changes, in addition to model buffers."""
        if not self._is_hybrid:
            return (self.counts.total,)
        return (self.counts.total, *(manager.over_budget for manager in self._managers))

    def install(self, *, marks_padding: bool = False) -> Callable[[], None]:
        """Start counting; return a function that stops it.

        Args:
            marks_padding: As for `TokenDrops`; ignored, as rows without a token come last here.
        """
        del marks_padding
        undo = ExitStack()
        for index, manager in enumerate(self._managers):
            manager.dispatch = self._counting(index, manager)
            undo.callback(manager.__dict__.pop, "dispatch", None)
            if self._is_hybrid:
                manager.setup_metadata = self._sized(manager)
                undo.callback(manager.__dict__.pop, "setup_metadata", None)
            else:  # this manager handles passes without gradients itself
                undo.callback(manager.forget)
        return undo.close

    @contextmanager
    def room_for_all(self) -> Iterator[None]:
        """Let eager passes omit no row; the host waits for the number of rows."""
        before = [manager.moe_expert_rank_capacity_factor for manager in self._managers]
        self._set([None] * len(before))
        try:
            yield
        finally:
            self._set(before)

    def set_factor(self, factor: float) -> None:
        """Set the room of a rank as a multiple of its own tokens' rows, from now on."""
        self._set([factor] * len(self._managers))
        for config in {id(m.config): m.config for m in self._managers}.values():
            setattr(config, _FACTOR, factor)

    def _set(self, factors: Sequence[float | None]) -> None:
        for manager, factor in zip(self._managers, factors, strict=True):
            manager.moe_expert_rank_capacity_factor = factor

    def _sized(self, manager: Any) -> Callable[..., None]:
        """Return ``setup_metadata`` without a budget in eager passes without gradients."""
        original = type(manager).setup_metadata

        def setup_metadata(routing_map: torch.Tensor, probs: torch.Tensor) -> None:
            factor = manager.moe_expert_rank_capacity_factor
            if not torch.is_grad_enabled() and not torch.cuda.is_current_stream_capturing():
                manager.moe_expert_rank_capacity_factor = None
            try:
                original(manager, routing_map, probs)
            finally:
                manager.moe_expert_rank_capacity_factor = factor

        return setup_metadata

    def _counting(self, index: int, manager: Any) -> Callable[..., torch.Tensor]:
        original = type(manager).dispatch

        def dispatch(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            has_budget = manager.num_permuted_tokens is not None
            rows: torch.Tensor = original(manager, hidden_states, *args, **kwargs)
            if not torch.is_grad_enabled():
                return rows
            if not self._is_hybrid:
                if manager.is_over is not None:
                    self.counts.add(index, manager.is_over)
                elif self.load.is_measured:
                    self.load.add(hidden_states.shape[0], manager.num_rows_sent)
                return rows
            if has_budget:
                self.counts.add(index, overflow_of(manager))
            elif self.load.is_measured:
                # Without a budget the host knows the number of received rows.
                self.load.add(hidden_states.shape[0], torch.tensor(rows.shape[0]))
            return rows

        return dispatch

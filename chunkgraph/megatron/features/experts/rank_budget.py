"""DeepEP with a fixed number of rows for each expert-parallel rank, by HybridEP or within a node.

What a rank's experts get is then allocated at that size, and nothing is read on the host. What a
rank has no room for is left out, with a flag on the device. Here every flag is counted, inside the
graphs, and the rows that were wanted are kept, so that a step can be held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chunkgraph.errors import ConfigError, ReplayMismatchError
from chunkgraph.megatron.core.access import import_megatron, private_names, versions
from chunkgraph.megatron.features.experts.counts import DropCounts, HeaviestLoad
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

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_FUSED = "megatron.core.transformer.moe.fused_a2a"
_CONFIG = "megatron.core.transformer.transformer_config"
_FACTOR = "moe_expert_rank_capacity_factor"
_BACKENDS = ("hybridep", "deepep")
_HANDLE_LENGTH = 11
"""Of what DeepEP hands back of a dispatch; the place below is counted in it."""
_OVERFLOW = 10


def knows_rank_budget() -> bool:
    """Whether this release of Megatron has a fixed budget of a rank (0.18 and later)."""
    config = import_megatron(_CONFIG).TransformerConfig
    return _FACTOR in getattr(config, "__dataclass_fields__", {})


def flex_backend(config: Any) -> str | None:
    """``hybridep``, ``deepep`` or another, of Megatron's config or arguments; None: not flex."""
    if not getattr(config, "num_moe_experts", None):
        return None
    if getattr(config, "moe_token_dispatcher_type", None) != "flex":
        return None
    return getattr(config, "moe_flex_dispatcher_backend", None) or "deepep"  # Megatron's default


def uses_rank_budget(config: Any) -> bool:
    """Whether Megatron's ``config`` asks for DeepEP, in either way, with a budget."""
    return flex_backend(config) in _BACKENDS and getattr(config, _FACTOR, None) is not None


def rank_factor_for_all(num_experts: int, top_k: int, num_ranks: int) -> float:
    """The budget's factor with which a rank has room for every token of all ranks.

    Each of ``num_ranks`` sends a token at most once to each expert there.
    """
    return num_ranks * min(top_k, num_experts // num_ranks) / top_k


class RankBudget:
    """Counts, on the device, the dispatches of which a rank had no room for some rows.

    In a graph and in eager training passes. Passes without gradients that are not captured are
    given room for all, for which HybridEP waits for the device: nobody would hear of a flag.

    Args:
        layers: with experts, all with one of DeepEP's two dispatchers; at least one.

    Attributes:
        counts: by layer, the dispatches that were over the budget.
        layers: their layer numbers, from 1.
        load: rows that a microbatch sent to this rank, where it is followed.
        restore_managers: gives layers back Megatron's dispatch, where it had to be replaced.

    Raises:
        ConfigError: a dispatcher is not the one that was looked at.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._fused = import_megatron(_FUSED)
        self._is_hybrid = layers[0].config.moe_flex_dispatcher_backend == "hybridep"
        private_names(_FUSED, "_hybrid_ep_buffer" if self._is_hybrid else "_buffer")
        self.restore_managers: Callable[[], None] = lambda: None
        if self._is_hybrid:
            (manager,) = private_names(_DISPATCHER, "_HybridEPManager")
        else:
            manager = WorstCaseManager
            self.restore_managers = use_worst_case_dispatch(layers)
        self._managers: list[Any] = [
            getattr(layer.token_dispatcher, "_comm_manager", None) for layer in layers
        ]
        for layer, found in zip(layers, self._managers, strict=True):
            if not isinstance(found, manager):
                raise ConfigError(
                    f"Layer {layer.layer_number} dispatches its tokens by {type(found).__name__}, "
                    f"not by {manager.__name__} of megatron-core {versions()['megatron_core']}. "
                    "Give all layers one dispatcher."
                )
        self.counts = DropCounts(len(layers), next(layers[0].parameters()).device)
        self.load = HeaviestLoad()
        self.layers = tuple(int(layer.layer_number or 0) for layer in layers)
        self._captured: tuple[Any, int] | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a captured forward adds to, besides a model's buffers."""
        if not self._is_hybrid:
            return (self.counts.total,)
        return (self.counts.total, *(manager.over_budget for manager in self._managers))

    def install(self, *, marks_padding: bool = False) -> Callable[[], None]:
        """Begin to count; returns a function that ends it.

        Args:
            marks_padding: as for `TokenDrops`; here rows without a token lie behind the others.
        """
        del marks_padding
        undo = ExitStack()
        for index, manager in enumerate(self._managers):
            manager.dispatch = self._counting(index, manager)
            undo.callback(manager.__dict__.pop, "dispatch", None)
            if self._is_hybrid:
                manager.setup_metadata = self._sized(manager)
                undo.callback(manager.__dict__.pop, "setup_metadata", None)
            else:  # which sizes itself
                undo.callback(manager.forget)
        return undo.close

    @contextmanager
    def room_for_all(self) -> Iterator[None]:
        """Inside, eager passes leave nothing out; the host waits for the number of rows."""
        before = [manager.moe_expert_rank_capacity_factor for manager in self._managers]
        self._set([None] * len(before))
        try:
            yield
        finally:
            self._set(before)

    def set_factor(self, factor: float) -> None:
        """From now on a rank has room for so many times its own tokens' rows."""
        self._set([factor] * len(self._managers))
        for config in {id(m.config): m.config for m in self._managers}.values():
            setattr(config, _FACTOR, factor)

    def remember_buffer(self) -> None:
        """Graphs were captured with DeepEP's buffer as it is now."""
        self._captured = self._buffer()

    def is_buffer_replaced(self) -> bool:
        """Whether DeepEP has another buffer since the last capture."""
        if self._captured is None:
            return False
        (held, before), (now, tokens) = self._captured, self._buffer()
        return now is not held or tokens != before

    def check_buffer(self) -> None:
        """Before a replay.

        Raises:
            ReplayMismatchError: DeepEP has another buffer since the capture.
        """
        if self.is_buffer_replaced():
            assert self._captured is not None
            (_, before), (_, tokens) = self._captured, self._buffer()
            if not self._is_hybrid:
                raise ReplayMismatchError(
                    "DeepEP allocated its buffer anew outside of all steps since the graphs were "
                    "captured, for other ranks or wider rows, and the graphs write to the one "
                    "before. Give the other dispatch in this process a buffer of its own, or "
                    "release() the graphs before it."
                )
            raise ReplayMismatchError(
                "DeepEP allocated its buffer anew outside of all steps since the graphs were "
                f"captured: a pass had {tokens} tokens on this rank, and the graphs write to the "
                f"buffer of {before}. Run such passes through the wrapped schedule (forward_only), "
                "after which all ranks capture anew, or release() the graphs before them."
            )

    def _buffer(self) -> tuple[Any, int]:
        if not self._is_hybrid:  # its size does not depend on the tokens
            return self._fused._buffer, 0
        buffer = self._fused._hybrid_ep_buffer
        if buffer is None:
            return None, 0
        return buffer, int(buffer.configurer.buffer_config.max_num_of_tokens_per_rank)

    def _set(self, factors: Sequence[float | None]) -> None:
        for manager, factor in zip(self._managers, factors, strict=True):
            manager.moe_expert_rank_capacity_factor = factor

    def _sized(self, manager: Any) -> Callable[..., None]:
        """``setup_metadata``: no budget in an eager pass without gradients."""
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
                elif self.load.is_followed:
                    self.load.add(hidden_states.shape[0], manager.num_wanted)
                return rows
            if has_budget:
                handle = manager.handle
                if len(handle) != _HANDLE_LENGTH:
                    raise ConfigError(
                        f"DeepEP hands back {len(handle)} values of a dispatch, and "
                        f"{_HANDLE_LENGTH} were looked at. Use the hybrid-ep branch of 1.2.1."
                    )
                self.counts.add(index, handle[_OVERFLOW])
            elif self.load.is_followed:
                # As many as came: without a budget the host knows.
                self.load.add(hidden_states.shape[0], torch.tensor(rows.shape[0]))
            return rows

        return dispatch

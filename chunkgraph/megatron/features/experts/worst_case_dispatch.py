"""DeepEP's dispatch within a node, sized for the worst case, without host waits.

Megatron's manager of DeepEP waits for the number of received rows, and sizes the rest by it. DeepEP
can also size its output for the maximum, every token of all ranks; then the host reads nothing. The
manager here does that and replaces Megatron's. Like HybridEP with a budget, it gives the experts of
a rank a fixed number of rows, sorted by expert with used rows first, and a flag on the device if
more rows arrived. In eager passes, ranks exchange their numbers of tokens, as DeepEP writes past
the end of a buffer that is too short; in a graph the numbers are those of its bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.megatron.rules.deep_ep import DEEPEP_RANKS

__all__ = ["WorstCaseManager", "rows_within", "use_worst_case_dispatch"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_FUSED = "megatron.core.transformer.moe.fused_a2a"
_UTILS = "megatron.core.transformer.moe.moe_utils"


def use_worst_case_dispatch(layers: Sequence[Any]) -> Callable[[], None]:
    """Give expert ``layers`` managers that read nothing on the host; return the undo function.

    Layers that already have such a manager keep it.

    Raises:
        ConfigError: A layer uses another dispatcher, or a number of ranks that DeepEP does not
            support.
    """
    (replaceable,) = private_names(_DISPATCHER, "_DeepepManager")
    private_names(_FUSED, "_buffer", "get_hidden_bytes")
    undo = ExitStack()
    for layer in layers:
        dispatcher = layer.token_dispatcher
        manager = getattr(dispatcher, "_comm_manager", None)
        if isinstance(manager, WorstCaseManager):
            continue
        if not isinstance(manager, replaceable):
            undo.close()
            raise ConfigError(
                f"Layer {layer.layer_number} dispatches its tokens by {type(manager).__name__}, "
                f"not by {replaceable.__name__}. Give all layers one dispatcher."
            )
        if (num_ranks := manager.group.size()) not in DEEPEP_RANKS:
            undo.close()
            raise ConfigError(
                f"Layer {layer.layer_number} shares its experts between {num_ranks} ranks; DeepEP "
                f"dispatches in a graph between {', '.join(map(str, DEEPEP_RANKS))} ranks of a "
                "node. Set expert_model_parallel_size to one of these, or "
                "moe_flex_dispatcher_backend to 'hybridep'."
            )
        dispatcher._comm_manager = WorstCaseManager(manager)
        undo.callback(setattr, dispatcher, "_comm_manager", manager)
    return undo.close


def rows_within(
    chosen: torch.Tensor, budget: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the received rows that fit into ``budget``.

    Rows fill the budget expert by expert, in order of arrival within an expert. The host reads
    nothing.

    Args:
        chosen: Whether a row goes to an expert, shape [rows, local experts], bool.
        budget: Room for the rows of all experts together.

    Returns:
        The selected part of ``chosen``; the selected rows by expert, shape [local experts], int64;
        and the number of rows without a budget, a scalar, int32.
    """
    by_expert = chosen.T.reshape(-1)
    place = by_expert.cumsum(0, dtype=torch.int32)
    selected = (by_expert & (place <= budget)).view(chosen.shape[1], -1)
    return selected.T.contiguous(), selected.sum(1), place[-1].clone()  # frees the other places


class WorstCaseManager:
    """Replacement for Megatron's manager of DeepEP's dispatch in one layer.

    Args:
        replaced: Megatron's manager.

    Attributes:
        moe_expert_rank_capacity_factor: Room as a multiple of the rows of a rank's own tokens;
            None for room for all received rows, for whose number the host then waits. Passes
            without gradients that are not captured have room for all too.
        num_permuted_tokens: Rows of the experts' input.
        num_rows_sent: Rows that were sent to the local experts, a scalar on the device, int32.
        is_over: Whether some of them had no room, a scalar on the device, bool; None if there was
            room for all.
    """

    def __init__(self, replaced: Any) -> None:
        self.group = replaced.group
        self.config = replaced.config
        self.num_local_experts: int = replaced.num_local_experts
        self.num_experts: int = replaced.num_experts
        self.router_topk: int = replaced.router_topk
        self.moe_expert_rank_capacity_factor: float | None = getattr(
            replaced.config, "moe_expert_rank_capacity_factor", None
        )
        self.num_permuted_tokens: int | None = None
        self.num_rows_sent: torch.Tensor | None = None
        self.is_over: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self._indices: torch.Tensor | None = None
        self._handle: tuple[Any, ...] | None = None
        self._row_map: torch.Tensor | None = None
        self._received_shape: torch.Size | None = None
        self._fused: Any = import_megatron(_FUSED)
        self._utils: Any = import_megatron(_UTILS)

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Set the destinations of tokens for the next `dispatch`.

        Args:
            routing_map: Chosen experts, bool, [tokens, all experts] elements; a token may have
                none.
            probs: Probabilities, of the same size.
        """
        num_tokens = routing_map.shape[0]
        chosen = routing_map.reshape(num_tokens, self.num_experts).bool()
        probs = probs.reshape(num_tokens, self.num_experts).float()
        # A token may choose an expert at probability 0.
        first = probs.detach().masked_fill(~chosen, -1.0).topk(self.router_topk, dim=-1).indices
        self._indices = first.masked_fill(~chosen.gather(1, first), -1)
        self.token_probs = probs

    def dispatch(
        self, hidden_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> torch.Tensor:
        """Send tokens to their experts.

        Args:
            hidden_states: Tokens, shape [tokens, hidden].

        Returns:
            Rows sorted by expert, shape [`num_permuted_tokens`, hidden]. Rows after the used ones
            (see `get_number_of_tokens_per_expert`) are undefined.
        """
        assert self._indices is not None
        num_tokens = hidden_states.shape[0]
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        most_tokens = num_tokens if is_captured else self._most_tokens(num_tokens)
        rows, probs, chosen, self._handle = _Dispatch.apply(
            hidden_states.contiguous(),
            self.token_probs,
            self._indices,
            self,
            most_tokens * self.group.size(),
        )
        has_limit = is_captured or torch.is_grad_enabled()
        budget = self._budget(num_tokens) if has_limit else None
        most = rows.shape[0] * min(self.router_topk, self.num_local_experts)
        selected, self.tokens_per_expert, self.num_rows_sent = rows_within(
            chosen, most if budget is None else budget
        )
        self.is_over = None
        if budget is None:
            budget = self._aligned(max(1, int(self.num_rows_sent)))
        elif budget < most:
            self.is_over = self.num_rows_sent > budget
        self.num_permuted_tokens = budget
        self._received_shape = rows.shape
        permuted, self.dispatched_probs, self._row_map, *_ = self._utils.permute(
            rows, selected, probs=probs, num_out_tokens=self.num_permuted_tokens, fused=True
        )
        return permuted

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows, which are already sorted by expert, and their probabilities."""
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """Return the rows of each expert, shape [local experts], int64, on the device."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows unchanged; `combine` restores their order."""
        return hidden_states

    def combine(
        self, hidden_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> torch.Tensor:
        """Send the experts' results back, and sum them by token: shape [tokens, hidden]."""
        rows = self._utils.unpermute(
            hidden_states, self._row_map, restore_shape=self._received_shape, fused=True
        )
        combined: torch.Tensor = _Combine.apply(rows, self._handle, self)
        self._handle = self._row_map = self._indices = None
        self.token_probs = self.dispatched_probs = self.tokens_per_expert = None
        return combined

    def forget(self) -> None:
        """Drop the counts of the last dispatch, which may use memory of graphs."""
        self.num_rows_sent = self.is_over = None

    def buffer(self, hidden_states: torch.Tensor) -> Any:
        """Return DeepEP's process-wide buffer from Megatron's module; create it if necessary.

        Megatron's own function also queries the size between nodes, which a build for one node
        does not support.
        """
        kind, size = self._fused.Buffer, self.group.size()
        hidden_bytes = self._fused.get_hidden_bytes(hidden_states)
        needed = max(
            config.get_nvl_buffer_size_hint(hidden_bytes, size)
            for config in (kind.get_dispatch_config(size), kind.get_combine_config(size))
        )
        buffer = self._fused._buffer
        if buffer is None or buffer.group != self.group or buffer.num_nvl_bytes < needed:
            buffer = self._fused._buffer = kind(self.group, needed, 0)
        return buffer

    def _most_tokens(self, num_tokens: int) -> int:
        """Return the most tokens of any rank that shares the experts; wait for all of them."""
        most = torch.tensor([num_tokens], device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def _budget(self, num_tokens: int) -> int | None:
        """Return the rows of the experts' input; None for all received rows."""
        factor = self.moe_expert_rank_capacity_factor
        if factor is None:
            return None
        most = num_tokens * self.group.size() * min(self.router_topk, self.num_local_experts)
        return self._aligned(min(int(num_tokens * self.config.moe_router_topk * factor), most))

    def _aligned(self, rows: int) -> int:
        """Round up to the alignment of the grouped product."""
        align = self._utils.get_align_size_for_quantization(self.config)
        return rows + (-rows % align if align else 0)


class _Dispatch(torch.autograd.Function):
    """Sends tokens; returns received rows, their probabilities, their experts and a handle."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        probs: torch.Tensor,
        indices: torch.Tensor,
        manager: Any,
        most_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        buffer = manager.buffer(x)
        weights = probs.gather(1, indices.clamp(min=0))
        per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(
            indices, manager.num_experts
        )
        rows, places, row_weights, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=indices,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=most_rows,
        )
        chosen = _one_hot(places, manager.num_local_experts)
        ctx.save_for_backward(indices, places)
        ctx.manager, ctx.handle = manager, handle
        spread = _spread(row_weights, chosen)
        chosen = chosen.any(1)
        ctx.mark_non_differentiable(chosen)
        return rows, spread, chosen, handle

    @staticmethod
    def backward(
        ctx: Any, of_rows: torch.Tensor, of_probs: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        indices, places = ctx.saved_tensors
        of_row_weights = of_probs.gather(1, places.clamp(min=0)).masked_fill(places < 0, 0.0)
        of_x, of_weights, _ = ctx.manager.buffer(of_rows).combine(
            of_rows.contiguous(), ctx.handle, topk_weights=of_row_weights
        )
        chosen = _one_hot(indices, ctx.manager.num_experts)
        return of_x, _spread(of_weights, chosen), None, None, None


class _Combine(torch.autograd.Function):
    """Sums the ranks' results of each token."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, handle: tuple[Any, ...], manager: Any
    ) -> torch.Tensor:
        ctx.manager, ctx.handle = manager, handle
        combined, _, _ = manager.buffer(rows).combine(rows.contiguous(), handle)
        return combined

    @staticmethod
    def backward(ctx: Any, of_combined: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, *_ = ctx.manager.buffer(of_combined).dispatch(
            of_combined.contiguous(), handle=ctx.handle
        )
        return rows, None, None


def _one_hot(indices: torch.Tensor, num: int) -> torch.Tensor:
    """Return the one-hot form [n, k, num], bool, of ``indices`` [n, k], where -1 is none."""
    return indices.unsqueeze(-1) == torch.arange(num, device=indices.device)


def _spread(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Scatter ``values`` [n, k] to ``places`` (see `_one_hot`), 0 elsewhere: [n, num].

    Values without a place are ignored; they may be uninitialized memory.
    """
    return torch.where(places, values.unsqueeze(-1), 0.0).sum(1)

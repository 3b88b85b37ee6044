"""DeepEP's dispatch within a node, with as many rows as could come: no host waits for a number.

Megatron's manager of DeepEP asks how many rows came, and sizes what follows by the answer. DeepEP
can also be told the most that could come: every token of all ranks. Then nothing is read on the
host. Here a manager of that kind takes the place of Megatron's. As HybridEP does with a budget, it
gives the experts of a rank a fixed number of rows, those in use first, sorted by expert, and a flag
on the device where there were more. In eager passes ranks tell each other their numbers of tokens,
since DeepEP writes behind a buffer that is too short; in a graph they are those of its bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron, private_names
from chunkgraph.settings import DEEPEP_RANKS

__all__ = ["WorstCaseManager", "rows_within", "use_worst_case_dispatch"]

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_FUSED = "megatron.core.transformer.moe.fused_a2a"
_UTILS = "megatron.core.transformer.moe.moe_utils"


def use_worst_case_dispatch(layers: Sequence[Any]) -> Callable[[], None]:
    """Give ``layers``, of experts, managers that read nothing on the host; returns the way back.

    Those that have such a manager keep it.

    Raises:
        ConfigError: a layer dispatches in another way, or over ranks that DeepEP cannot serve.
    """
    (megatrons,) = private_names(_DISPATCHER, "_DeepepManager")
    private_names(_FUSED, "_buffer", "get_hidden_bytes")
    undo = ExitStack()
    for layer in layers:
        dispatcher = layer.token_dispatcher
        found = getattr(dispatcher, "_comm_manager", None)
        if isinstance(found, WorstCaseManager):
            continue
        if not isinstance(found, megatrons):
            undo.close()
            raise ConfigError(
                f"Layer {layer.layer_number} dispatches its tokens by {type(found).__name__}, not "
                f"by {megatrons.__name__}. Give all layers one dispatcher."
            )
        if (num_ranks := found.group.size()) not in DEEPEP_RANKS:
            undo.close()
            raise ConfigError(
                f"Layer {layer.layer_number} shares its experts between {num_ranks} ranks; DeepEP "
                f"dispatches in a graph between {', '.join(map(str, DEEPEP_RANKS))} ranks of a "
                "node. Set expert_model_parallel_size to one of these, or "
                "moe_flex_dispatcher_backend to 'hybridep'."
            )
        dispatcher._comm_manager = WorstCaseManager(found)
        undo.callback(setattr, dispatcher, "_comm_manager", found)
    return undo.close


def rows_within(
    chosen: torch.Tensor, budget: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which of the rows that came are computed, where there is room for ``budget``.

    Rows are taken expert by expert, within one as they came, until there is no more room; nothing
    is read on the host.

    Args:
        chosen: shape [rows, local experts], bool: which row goes to which expert.
        budget: rows of all experts together.

    Returns:
        Those of ``chosen`` that are computed; their numbers by expert, shape [local experts],
        int64; and how many there would be with room for all, a scalar, int32.
    """
    by_expert = chosen.T.reshape(-1)
    place = by_expert.cumsum(0, dtype=torch.int32)
    kept = (by_expert & (place <= budget)).view(chosen.shape[1], -1)
    return kept.T.contiguous(), kept.sum(1), place[-1].clone()  # not all the places with it


class WorstCaseManager:
    """In the place of Megatron's manager of DeepEP's dispatch, for one layer.

    Args:
        replaced: Megatron's.

    Attributes:
        moe_expert_rank_capacity_factor: room for so many times the rows that a rank's own tokens
            make; None: for all that come, whose number the host then waits for. Passes without
            gradients that are not captured have room for all too.
        num_permuted_tokens: rows of the experts' input.
        num_wanted: rows that came to the experts here, a scalar on the device, int32.
        is_over: a scalar on the device, bool: whether there was no room for some of them; None
            where there was room for all.
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
        self.num_wanted: torch.Tensor | None = None
        self.is_over: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self._indices: torch.Tensor | None = None
        self._handle: tuple[Any, ...] | None = None
        self._row_map: torch.Tensor | None = None
        self._came: torch.Size | None = None
        self._fused: Any = import_megatron(_FUSED)
        self._utils: Any = import_megatron(_UTILS)

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Before `dispatch`: where each token goes.

        Args:
            routing_map: bool, of [tokens, all experts] elements; a token may go nowhere.
            probs: of the same size.
        """
        num_tokens = routing_map.shape[0]
        chosen = routing_map.reshape(num_tokens, self.num_experts).bool()
        probs = probs.reshape(num_tokens, self.num_experts).float()
        # A token may have chosen an expert at probability 0.
        first = probs.detach().masked_fill(~chosen, -1.0).topk(self.router_topk, dim=-1).indices
        self._indices = first.masked_fill(~chosen.gather(1, first), -1)
        self.token_probs = probs

    def dispatch(
        self, hidden_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> torch.Tensor:
        """Send tokens to their experts.

        Args:
            hidden_states: shape [tokens, hidden].

        Returns:
            Shape [`num_permuted_tokens`, hidden], sorted by expert; rows behind those in use, of
            which `get_number_of_tokens_per_expert` tells, hold anything.
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
        kept, self.tokens_per_expert, self.num_wanted = rows_within(
            chosen, most if budget is None else budget
        )
        self.is_over = None
        if budget is None:
            budget = self._aligned(max(1, int(self.num_wanted)))
        elif budget < most:
            self.is_over = self.num_wanted > budget
        self.num_permuted_tokens = budget
        self._came = rows.shape
        permuted, self.dispatched_probs, self._row_map, *_ = self._utils.permute(
            rows, kept, probs=probs, num_out_tokens=self.num_permuted_tokens, fused=True
        )
        return permuted

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """They are sorted by expert already."""
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """Shape [local experts], int64, on the device."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Left to `combine`."""
        return hidden_states

    def combine(
        self, hidden_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> torch.Tensor:
        """Send the experts' results back, and add up those of a token: shape [tokens, hidden]."""
        rows = self._utils.unpermute(
            hidden_states, self._row_map, restore_shape=self._came, fused=True
        )
        combined: torch.Tensor = _Combine.apply(rows, self._handle, self)
        self._handle = self._row_map = self._indices = None
        self.token_probs = self.dispatched_probs = self.tokens_per_expert = None
        return combined

    def forget(self) -> None:
        """Let go of what the last dispatch counted: graphs' memory, perhaps."""
        self.num_wanted = self.is_over = None

    def buffer(self, hidden_states: torch.Tensor) -> Any:
        """DeepEP's, of the process, where Megatron keeps it; made in the first eager step.

        Megatron asks for the size of one between nodes too, which a build for one node has not.
        """
        kind, size = self._fused.Buffer, self.group.size()
        hidden_bytes = self._fused.get_hidden_bytes(hidden_states)
        needed = max(
            config.get_nvl_buffer_size_hint(hidden_bytes, size)
            for config in (kind.get_dispatch_config(size), kind.get_combine_config(size))
        )
        kept = self._fused._buffer
        if kept is None or kept.group != self.group or kept.num_nvl_bytes < needed:
            kept = self._fused._buffer = kind(self.group, needed, 0)
        return kept

    def _most_tokens(self, num_tokens: int) -> int:
        """Of any rank that shares the experts; waits for all of them."""
        most = torch.tensor([num_tokens], device="cuda")
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def _budget(self, num_tokens: int) -> int | None:
        """Rows of the experts' input; None: as many as come."""
        factor = self.moe_expert_rank_capacity_factor
        if factor is None:
            return None
        most = num_tokens * self.group.size() * min(self.router_topk, self.num_local_experts)
        return self._aligned(min(int(num_tokens * self.config.moe_router_topk * factor), most))

    def _aligned(self, rows: int) -> int:
        """As many, or some more, as the grouped product wants them."""
        align = self._utils.get_align_size_for_quantization(self.config)
        return rows + (-rows % align if align else 0)


class _Dispatch(torch.autograd.Function):
    """Rows that came, their probabilities and experts, and what DeepEP needs for the way back."""

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
        rows, places, came, _, handle, _ = buffer.dispatch(
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
        spread = _spread(came, chosen)
        chosen = chosen.any(1)
        ctx.mark_non_differentiable(chosen)
        return rows, spread, chosen, handle

    @staticmethod
    def backward(
        ctx: Any, of_rows: torch.Tensor, of_probs: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        indices, places = ctx.saved_tensors
        of_came = of_probs.gather(1, places.clamp(min=0)).masked_fill(places < 0, 0.0)
        of_x, of_weights, _ = ctx.manager.buffer(of_rows).combine(
            of_rows.contiguous(), ctx.handle, topk_weights=of_came
        )
        chosen = _one_hot(indices, ctx.manager.num_experts)
        return of_x, _spread(of_weights, chosen), None, None, None


class _Combine(torch.autograd.Function):
    """What the ranks computed of each token, added up."""

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
    """Of ``indices`` [n, k], -1 for none: bool, [n, k, num]."""
    return indices.unsqueeze(-1) == torch.arange(num, device=indices.device)


def _spread(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``values`` [n, k] put to ``places`` (see `_one_hot`), 0 elsewhere: [n, num].

    A value without a place may be anything, as memory that nobody wrote.
    """
    return torch.where(places, values.unsqueeze(-1), 0.0).sum(1)

"""Experts with a fixed capacity in the graphs of one rank; dropped tokens are counted.

More tokens may choose an expert than it has room for, and Megatron drops the excess silently.

With ``moe_expert_capacity_factor`` and ``moe_pad_expert_input_to_capacity`` every expert gets the
same number of rows from every rank, known before the tokens are. Megatron's all-to-all dispatcher
then uses host numbers only. Its all-gather dispatcher counts the rows on the device anyway and
waits for the result; the patched one uses the known number instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.capturing import HostTorch, has_gpu, host_full
from chunkgraph.megatron.features.experts.room import Room, RowCounts
from chunkgraph.megatron.features.experts.rows_in_use import PADDING
from chunkgraph.megatron.features.experts.unique_indices import scattered_routes

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_ROUTER = "megatron.core.transformer.moe.router"
_FACTOR = "moe_expert_capacity_factor"


class CapacityExperts:
    """Counts on the device how often an expert had no room for a token that chose it.

    The count is part of the forward, so graphs contain it. Forwards without gradients
    (evaluation, the first pass of recomputation) do not count, as in Megatron's own counts.

    Args:
        layers: Expert layers; none on some ranks.
        room: Room of an expert, as a capacity factor.
        device: Device of the layers.
        marks_padding: Whether rows that only fill an expert's room get probability `PADDING`;
            the experts must handle it (`watch_expert_rows`).

    Attributes:
        counts: Dropped tokens by layer; the load is the capacity factor that the tokens of a
            microbatch need on this rank.
    """

    description = ""

    def __init__(
        self, layers: Sequence[Any], room: Room, device: torch.device, *, marks_padding: bool
    ) -> None:
        self._layers = tuple(layers)
        self.counts = RowCounts([int(layer.layer_number or 0) for layer in layers], device)
        self._room = room
        self._marks_padding = marks_padding
        self._current: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured forward changes, in addition to model buffers."""
        return (self.counts.total,)

    def install(self) -> Callable[[], None]:
        """Start counting; return a function that stops it."""
        module = import_megatron(_ROUTER)
        (drop,) = private_names(_ROUTER, "apply_router_token_dropping")
        undo = ExitStack()
        for index, layer in enumerate(self._layers):
            for handle in (
                layer.router.register_forward_pre_hook(partial(self._enter, index)),
                layer.router.register_forward_hook(partial(self._enter, None), always_call=True),
            ):
                undo.callback(handle.remove)

        def counting(
            routing_probs: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            probs, final_map = drop(routing_probs, routing_map, *args, **kwargs)
            if self._current is None:
                return probs, final_map
            if torch.is_grad_enabled():
                self.counts.add(self._current, routing_map > final_map)
                if self.counts.measures:
                    # With packed documents, an expert's room depends on tokens, not on all rows.
                    num_tokens = routing_map.any(1).sum()
                    # Megatron rounds the room up, so one token less suffices; this matters if
                    # there are few tokens.
                    most = (routing_map.sum(0).max() - 1).clamp(min=0)
                    config = self._layers[0].config
                    num_chosen = num_tokens * config.moe_router_topk
                    self.counts.add_load(num_chosen, most * config.num_moe_experts)
            if self._marks_padding:
                # Experts that were not chosen have probability 0.
                probs = torch.add(probs, final_map > routing_map, alpha=PADDING)
            return probs, final_map

        undo.callback(patch_attributes(module, {"apply_router_token_dropping": counting}))
        return undo.close

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make passes read nothing on the host."""
        with ExitStack() as undo:
            undo.callback(scattered_routes())
            undo.callback(gather_fixed_rows())
            if not has_gpu():
                module = import_megatron(_DISPATCHER)
                undo.callback(patch_attributes(module, {"torch": HostTorch()}))
            yield

    def verifying(self) -> AbstractContextManager[None]:
        """Return nothing to change: eager passes have the kernels of graphs."""
        return nullcontext()

    @contextmanager
    def having_room(self) -> Iterator[None]:
        """Let an eager step drop no token, and measure its load."""
        self._set(self._room.most)
        try:
            with self.counts.measuring():
                yield
        finally:
            self._set(self._room.factor)

    def grow(self) -> None:
        """Use a room that has grown."""
        self._set(self._room.factor)

    def _set(self, factor: float) -> None:
        """Set the capacity factor; existing graphs keep their captured room."""
        for layer in self._layers:
            parts = (layer, layer.router, layer.token_dispatcher, layer.experts)
            for config in {id(p.config): p.config for p in parts if hasattr(p, "config")}.values():
                setattr(config, _FACTOR, factor)
            if hasattr(layer.token_dispatcher, _FACTOR):
                setattr(layer.token_dispatcher, _FACTOR, factor)

    def _enter(self, index: int | None, *_: Any) -> None:
        self._current = index


def gather_fixed_rows() -> Callable[[], None]:
    """Make the all-gather dispatcher use a fixed number of rows; return the undo function.

    It returns the same rows in the same order as Megatron's, which selects them by a mask: for each
    expert the rows of its column, in the order of the tokens.
    """
    module = import_megatron(_DISPATCHER)
    (gathering,) = private_names(_DISPATCHER, "MoEAllGatherTokenDispatcher")
    private_names(_DISPATCHER, "permute", "get_capacity")

    def dispatch_postprocess(
        self: Any, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.hidden_shape_before_permute = hidden_states.shape
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, local].contiguous()
        num_ranks = self.tp_size * self.ep_size
        num_rows = num_ranks * module.get_capacity(
            num_tokens=hidden_states.shape[0] // num_ranks * self.router_topk,
            num_experts=self.config.num_moe_experts,
            capacity_factor=self.config.moe_expert_capacity_factor,
        )
        rows, self.local_probs, self.reversed_local_input_permutation_mapping, *_ = module.permute(
            hidden_states,
            self.local_map,
            probs=probs[:, local].contiguous(),
            num_out_tokens=num_rows * self.num_local_experts,
            drop_and_pad=True,
        )
        self.routing_map = None
        return rows, host_full((self.num_local_experts,), num_rows), self.local_probs

    return patch_attributes(gathering, {"dispatch_postprocess": dispatch_postprocess})

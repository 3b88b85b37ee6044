"""Count dropped tokens in Megatron's router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.features.experts.counts import DropCounts, HeaviestLoad
from chunkgraph.megatron.features.experts.rows_in_use import PADDING

__all__ = ["TokenDrops"]

_ROUTER = "megatron.core.transformer.moe.router"


class TokenDrops:
    """Counts on the device how often an expert had no room for a token that chose it.

    The count is part of the forward, so graphs contain it. Forwards without gradients
    (evaluation, the first pass of recomputation) do not count, as in Megatron's own counts.

    Args:
        routers: Routers whose drops are counted; at least one.

    Attributes:
        counts: Dropped tokens by router.
        layers: Layer numbers of the routers, from 1.
        load: Most tokens of a microbatch on this rank that chose one expert, minus one, if
            measured.
    """

    def __init__(self, routers: Sequence[Any]) -> None:
        self.counts = DropCounts(len(routers), next(routers[0].parameters()).device)
        self.load = HeaviestLoad()
        self.layers = tuple(int(router.layer_number or 0) for router in routers)
        self._routers = tuple(routers)
        self._current: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that a captured forward changes, in addition to model buffers."""
        return (self.counts.total,)

    def install(self, *, marks_padding: bool = False) -> Callable[[], None]:
        """Start counting; return a function that stops it.

        Args:
            marks_padding: Whether rows that only fill an expert's room get probability `PADDING`;
                the experts must handle it (`watch_expert_rows`).
        """
        module = import_megatron(_ROUTER)
        (drop,) = private_names(_ROUTER, "apply_router_token_dropping")
        undo = ExitStack()
        for index, router in enumerate(self._routers):
            for handle in (
                router.register_forward_pre_hook(self._enter_hook(index)),
                router.register_forward_hook(self._leave, always_call=True),
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
                if self.load.is_measured:
                    # With packed documents, an expert's room depends on tokens, not on all rows.
                    num_tokens = routing_map.any(1).sum()
                    # Megatron rounds the room up, so one token less suffices; this matters if
                    # there are few tokens.
                    self.load.add(num_tokens, (routing_map.sum(0).max() - 1).clamp(min=0))
            if marks_padding:
                # Experts that were not chosen have probability 0.
                probs = torch.add(probs, final_map > routing_map, alpha=PADDING)
            return probs, final_map

        undo.callback(patch_attributes(module, {"apply_router_token_dropping": counting}))
        return undo.close

    def _enter_hook(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._current = index

        return enter

    def _leave(self, *_: Any) -> None:
        self._current = None

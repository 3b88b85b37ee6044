"""Counts the tokens that found no room, where Megatron's router drops them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from chunkgraph.megatron.compat.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.compat.expert_rows import PADDING

__all__ = ["TokenDrops"]

_ROUTER = "megatron.core.transformer.moe.router"


class TokenDrops:
    """Adds up, on the device, how often an expert had no room for a token that chose it.

    The count is a part of the forward, so that graphs hold it. Forwards without gradients
    (evaluation, the first pass of recomputation) are not counted, as in Megatron's own counts.

    Args:
        routers: whose drops are counted; at least one.

    Attributes:
        counts: by router, shape [number of routers], dtype int64; it only grows.
        layers: layer numbers of the routers, from 1.
        most_chosen: the most tokens of a microbatch on this rank that chose one expert, since it
            was last cleared; shape [1], int64.
        num_tokens: of a microbatch on this rank, as last seen.
    """

    def __init__(self, routers: Sequence[Any]) -> None:
        self.counts = torch.zeros(
            len(routers), dtype=torch.int64, device=next(routers[0].parameters()).device
        )
        self.most_chosen = torch.zeros_like(self.counts[:1])
        self.num_tokens = 0
        self.layers = tuple(int(router.layer_number or 0) for router in routers)
        self._routers = tuple(routers)
        self._current: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a captured forward adds to, besides a model's buffers."""
        return (self.counts,)

    def install(
        self, *, follows_loads: bool = False, marks_padding: bool = False
    ) -> Callable[[], None]:
        """Begin to count; returns a function that ends it.

        Args:
            follows_loads: whether ``most_chosen`` is kept.
            marks_padding: whether rows that only fill an expert's room get probability `PADDING`;
                their experts must know of it (`watch_expert_rows`).
        """
        module = import_megatron(_ROUTER)
        (drop,) = private_names(_ROUTER, "apply_router_token_dropping")
        undo = ExitStack()
        for index, router in enumerate(self._routers):
            for handle in (
                router.register_forward_pre_hook(self._entered(index)),
                router.register_forward_hook(self._left, always_call=True),
            ):
                undo.callback(handle.remove)

        def counting(
            routing_probs: torch.Tensor, routing_map: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            probs, kept = drop(routing_probs, routing_map, *args, **kwargs)
            if self._current is not None and torch.is_grad_enabled():
                with torch.no_grad():
                    self.counts[self._current].add_((routing_map & ~kept).sum())
                    if follows_loads:
                        self.num_tokens = routing_map.shape[0]
                        most = routing_map.sum(0).max()
                        self.most_chosen.copy_(torch.maximum(self.most_chosen, most))
            if marks_padding and self._current is not None:
                probs = probs.masked_fill(kept & ~routing_map, PADDING)
            return probs, kept

        undo.callback(patch_attributes(module, {"apply_router_token_dropping": counting}))
        return undo.close

    def _entered(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._current = index

        return enter

    def _left(self, *_: Any) -> None:
        self._current = None

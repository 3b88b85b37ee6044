"""Counts the tokens that found no room, where Megatron's router drops them."""

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
    """Adds up, on the device, how often an expert had no room for a token that chose it.

    The count is a part of the forward, so that graphs hold it. Forwards without gradients
    (evaluation, the first pass of recomputation) are not counted, as in Megatron's own counts.

    Args:
        routers: whose drops are counted; at least one.

    Attributes:
        counts: by router, in tokens.
        layers: layer numbers of the routers, from 1.
        load: tokens of a microbatch on this rank that chose one expert but for one of them,
            where it is followed.
    """

    def __init__(self, routers: Sequence[Any]) -> None:
        self.counts = DropCounts(len(routers), next(routers[0].parameters()).device)
        self.load = HeaviestLoad()
        self.layers = tuple(int(router.layer_number or 0) for router in routers)
        self._routers = tuple(routers)
        self._current: int | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What a captured forward adds to, besides a model's buffers."""
        return (self.counts.total,)

    def install(self, *, marks_padding: bool = False) -> Callable[[], None]:
        """Begin to count; returns a function that ends it.

        Args:
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
            if self._current is None:
                return probs, kept
            if torch.is_grad_enabled():
                self.counts.add(self._current, routing_map > kept)
                if self.load.is_followed:
                    # Of packed documents, an expert's room is that of the tokens, not of all rows.
                    num_tokens = routing_map.any(1).sum()
                    # It is rounded up: one token less decides, of few tokens much.
                    self.load.add(num_tokens, (routing_map.sum(0).max() - 1).clamp(min=0))
            if marks_padding:
                # Of what was not chosen the probability is 0.
                probs = torch.add(probs, kept > routing_map, alpha=PADDING)
            return probs, kept

        undo.callback(patch_attributes(module, {"apply_router_token_dropping": counting}))
        return undo.close

    def _entered(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._current = index

        return enter

    def _left(self, *_: Any) -> None:
        self._current = None

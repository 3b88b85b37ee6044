"""Experts with a fixed capacity in the graphs of one rank; dropped tokens are counted.

More tokens may choose an expert than it has room for, and Megatron drops the excess silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.features.experts.counts import RowCounts
from chunkgraph.megatron.features.experts.dispatch import static_dispatch
from chunkgraph.megatron.features.experts.room import CapacityRoom
from chunkgraph.megatron.features.experts.rows_in_use import PADDING

__all__ = ["CapacityExperts"]

_ROUTER = "megatron.core.transformer.moe.router"


class CapacityExperts:
    """Counts on the device how often an expert had no room for a token that chose it.

    The count is part of the forward, so graphs contain it. Forwards without gradients
    (evaluation, the first pass of recomputation) do not count, as in Megatron's own counts.

    Args:
        layers: Expert layers; at least one.
        marks_padding: Whether rows that only fill an expert's room get probability `PADDING`;
            the experts must handle it (`watch_expert_rows`).

    Attributes:
        counts: Dropped tokens by layer; the load is the most tokens of a microbatch on this rank
            that chose one expert, minus one.
    """

    description = ""

    def __init__(self, layers: Sequence[Any], *, marks_padding: bool = False) -> None:
        self._routers = tuple(layer.router for layer in layers)
        device = next(self._routers[0].parameters()).device
        self.counts = RowCounts([int(layer.layer_number or 0) for layer in layers], device)
        self._room = CapacityRoom(layers)
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
                if self.counts.measures:
                    # With packed documents, an expert's room depends on tokens, not on all rows.
                    num_tokens = routing_map.any(1).sum()
                    # Megatron rounds the room up, so one token less suffices; this matters if
                    # there are few tokens.
                    most = (routing_map.sum(0).max() - 1).clamp(min=0)
                    self.counts.add_load(num_tokens, most)
            if self._marks_padding:
                # Experts that were not chosen have probability 0.
                probs = torch.add(probs, final_map > routing_map, alpha=PADDING)
            return probs, final_map

        undo.callback(patch_attributes(module, {"apply_router_token_dropping": counting}))
        return undo.close

    def capturing(self) -> AbstractContextManager[None]:
        """Make passes read nothing on the host."""
        return static_dispatch()

    def verifying(self) -> AbstractContextManager[None]:
        """Return nothing to change: eager passes have the kernels of graphs."""
        return nullcontext()

    @contextmanager
    def having_room(self) -> Iterator[None]:
        """Let an eager step drop no token, and measure its load."""
        with self._room.for_all(), self.counts.measuring():
            yield

    def give(self, load: int) -> None:
        """Make room for the heaviest load of any rank."""
        self._room.give(load)

    def _enter_hook(self, index: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._current = index

        return enter

    def _leave(self, *_: Any) -> None:
        self._current = None

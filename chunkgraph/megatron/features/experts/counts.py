"""Count rows without room, and measure loads, on the device, with few kernels.

A kernel on a few numbers takes about 2 us in a graph, in every layer of every microbatch. So a
layer only registers its flags, and one sum over all layers of a chunk runs at the end of the
chunk's forward. The load of experts matters only if there was no room for tokens; such a step runs
again, and only then is the load measured. Every step copies the counts to the host without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chunkgraph.megatron.core.access import import_megatron, patch_attributes, private_names
from chunkgraph.megatron.core.backward_pass import is_in_backward
from chunkgraph.megatron.features.experts.rows_in_use import PADDING

__all__ = ["LOAD_OF", "DropCounts", "DropReport", "HeaviestLoad", "TokenDrops"]

_ROUTER = "megatron.core.transformer.moe.router"
LOAD_OF = 1 << 20
"""Unit of loads: integers per 2^20 tokens, because ranks agree on integers."""


class DropCounts:
    """Counts by layer, on the device; they only grow.

    Args:
        num_layers: Number of layers.
        device: Device of the counts.

    Attributes:
        total: The counts, shape [num_layers], int64.
        is_recomputed: Whether a count ever happened in a backward.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.total = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self.is_recomputed = False
        self._pending: list[tuple[int, torch.Tensor]] | None = None

    def add(self, layer: int, flags: torch.Tensor) -> None:
        """Count the nonzero elements of ``flags``, of any shape, bool or integer.

        Inside `forward` the count happens at its end. Otherwise (a layer outside of the captured
        part, a layer that is recomputed in the backward) it happens at once.
        """
        if is_in_backward():
            self.is_recomputed = True
        elif self._pending is not None:
            self._pending.append((layer, flags))
            return
        self._add_up([(layer, flags)])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround the forward of a chunk; add up the flags at its end."""
        outer, self._pending = self._pending, []
        try:
            yield
            pending = self._pending
        finally:
            self._pending = outer
        for run in _runs(pending):
            self._add_up(run)

    def _add_up(self, run: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Add up the flags of consecutive layers, all of the same shape and type."""
        first = run[0][0]
        with torch.no_grad():
            flat = [tensor.detach().reshape(-1) for _, tensor in run]
            counts = torch.stack(flat) if len(flat) > 1 else flat[0].unsqueeze(0)
            if counts.dtype is not torch.bool:
                counts = counts != 0
            counts = counts.sum(1) if counts.shape[1] != 1 else counts.squeeze(1)
            self.total[first : first + len(run)].add_(counts)


class HeaviestLoad:
    """The heaviest load of one expert, or of one rank, over a step's microbatches.

    Attributes:
        is_measured: Whether the current step's loads are recorded.
    """

    def __init__(self) -> None:
        self.is_measured = False
        self._most: torch.Tensor | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure an eager step in which all tokens have room; discard an earlier load."""
        self._most, self.is_measured = None, True
        try:
            yield
        finally:
            self.is_measured = False

    def add(self, num_tokens: int | torch.Tensor, demand: torch.Tensor) -> None:
        """Record the load of a microbatch.

        Args:
            num_tokens: Tokens of the microbatch on this rank.
            demand: Most tokens or rows of any one expert or rank, a scalar; its device must be the
                same in every call.
        """
        at_least_one = torch.as_tensor(num_tokens, device=demand.device).clamp(min=1)
        load = -(-demand.to(torch.int64) * LOAD_OF // at_least_one)
        self._most = load if self._most is None else torch.maximum(self._most, load)

    def take(self) -> int:
        """Return the load per `LOAD_OF` tokens, rounded up, and reset it; wait for the device."""
        most, self._most = self._most, None
        return 0 if most is None else int(most)


def _runs(
    pending: Sequence[tuple[int, torch.Tensor]],
) -> Iterator[Sequence[tuple[int, torch.Tensor]]]:
    """Yield runs of consecutive layers whose tensors can be added up together."""
    begin = 0
    for end in range(1, len(pending) + 1):
        if end < len(pending):
            (layer, tensor), (previous, like) = pending[end], pending[end - 1]
            if (layer, tensor.shape, tensor.dtype) == (previous + 1, like.shape, like.dtype):
                continue
        yield pending[begin:end]
        begin = end


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


class DropReport:
    """Host copy of counts on the device.

    Every step copies the counts to the host after the last forward (after all kernels if experts
    are recomputed). Nothing waits for the copy: `by_layer` returns the last one that has arrived.
    The counts only grow, so nothing is lost if a step skips its copy because the previous one is
    still in flight.

    Args:
        counts: Counts by router, on the device, int64.
        layers: Layer numbers of the routers.
    """

    def __init__(self, counts: torch.Tensor, layers: Sequence[int]) -> None:
        self._counts = counts
        self._layers = tuple(layers)
        self._latest = [0] * len(self._layers)
        self._event: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None
        self._is_behind = False
        if counts.is_cuda:
            self._host = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._event = torch.cuda.Event()

    def end_step(self) -> None:
        """Start a copy of the counts on the current stream."""
        if self._event is None or self._host is None:
            self._latest = self._counts.tolist()
        elif self._arrived():
            self._send()
        else:
            self._is_behind = True

    def by_layer(self, *, wait: bool = False) -> dict[int, int]:
        """Return, by layer number, how often a token had no room so far on this rank.

        Args:
            wait: Wait for the device, so that the last step is included.
        """
        if wait and self._event is not None:
            if self._is_behind:  # the last step skipped its copy
                self._event.synchronize()
                self._send()
            self._event.synchronize()
        self._arrived()
        totals: dict[int, int] = {}
        for layer, count in zip(self._layers, self._latest, strict=True):
            totals[layer] = totals.get(layer, 0) + count
        return totals

    def _send(self) -> None:
        assert self._host is not None
        assert self._event is not None
        self._host.copy_(self._counts, non_blocking=True)
        self._event.record()
        self._is_behind = False

    def _arrived(self) -> bool:
        if self._event is None or self._host is None:
            return True
        if not self._event.query():
            return False
        self._latest = self._host.tolist()
        return True

"""Count rows without room, and measure loads, on the device, with few kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.megatron.core.backward_pass import is_in_backward

__all__ = ["LOAD_OF", "RowCounts"]

LOAD_OF = 1 << 20
"""Unit of loads: integers per 2^20 tokens, because ranks agree on integers."""


class RowCounts:
    """What the experts of one rank lack and need.

    Every step copies the counts to the host after the last forward (after all kernels if experts
    are recomputed). Nothing waits for the copy: `by_layer` returns what has arrived of it. The
    counts only grow, so one of a copy in flight is as valid as the one that it replaces.

    Args:
        layers: Layer numbers.
        device: Device of the counts.

    Attributes:
        layers: The layer numbers.
        total: Lack of room by layer, shape [layers], int64, on the device; it only grows.
        is_recomputed: Whether a count ever happened in a backward.
        measures: Whether the current step runs again, with room for all, to measure its load.
    """

    def __init__(self, layers: Sequence[int], device: torch.device) -> None:
        self.layers = tuple(layers)
        self.total = torch.zeros(len(self.layers), dtype=torch.int64, device=device)
        self.is_recomputed = False
        self.measures = False
        self._heaviest: torch.Tensor | None = None
        is_cuda = self.total.is_cuda
        self._host = torch.zeros(self.total.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def add(self, index: int, flags: torch.Tensor) -> None:
        """Count the nonzero elements of ``flags``, of any shape, bool or integer, in a layer."""
        if is_in_backward():
            self.is_recomputed = True
        with torch.no_grad():
            flags = flags if flags.dtype is torch.bool else flags != 0
            self.total[index].add_(flags.sum() if flags.numel() > 1 else flags.view(()))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure an eager step in which all tokens have room; discard an earlier load."""
        self._heaviest, self.measures = None, True
        try:
            yield
        finally:
            self.measures = False

    def add_load(self, num_tokens: int | torch.Tensor, demand: torch.Tensor) -> None:
        """Record the load of a microbatch.

        Args:
            num_tokens: Tokens of the microbatch on this rank.
            demand: Most tokens or rows of any one expert or rank, a scalar; its device must be the
                same in every call.
        """
        at_least_one = torch.as_tensor(num_tokens, device=demand.device).clamp(min=1)
        load = -(-demand.to(torch.int64) * LOAD_OF // at_least_one)
        self._heaviest = load if self._heaviest is None else torch.maximum(self._heaviest, load)

    def take_load(self) -> int:
        """Return the heaviest load of a microbatch per `LOAD_OF` tokens, rounded up, and reset it.

        Waits for the device.
        """
        most, self._heaviest = self._heaviest, None
        return 0 if most is None else int(most)

    def send(self) -> None:
        """Start a copy of the counts to the host, on the current stream."""
        self._host.copy_(self.total, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def by_layer(self, *, wait: bool = False) -> dict[int, int]:
        """Return, by layer number, how often a token had no room so far on this rank.

        Args:
            wait: Wait for the device, so that the last step is included.
        """
        if wait and self._event is not None:
            self._event.synchronize()
        totals: dict[int, int] = {}
        for layer, count in zip(self.layers, self._host.tolist(), strict=True):
            totals[layer] = totals.get(layer, 0) + count
        return totals

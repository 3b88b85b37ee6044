"""Copy the counts of dropped tokens to the host after each step, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["DropReport"]


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

"""What the plug-in tells of dropped tokens: a count that comes after the step, without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["DropReport"]


class DropReport:
    """Follows a count on the device from the host.

    In every step the count is copied to the host, behind the last forward (behind all kernels where
    experts are computed anew). Nobody waits for it: `by_layer` is as of the last copy that has
    arrived.
    The count only grows, so that nothing is lost when a copy is left out because the one before it
    is still under way.

    Args:
        counts: on the device, by router, int64.
        layers: layer numbers of the routers.
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
        """Send the count on its way, on the current stream."""
        if self._event is None or self._host is None:
            self._latest = self._counts.tolist()
        elif self._arrived():
            self._send()
        else:
            self._is_behind = True

    def by_layer(self, *, wait: bool = False) -> dict[int, int]:
        """Layer number -> how often a token found no room there, so far, on this rank.

        Args:
            wait: for the device, so that the last step is in it.
        """
        if wait and self._event is not None:
            if self._is_behind:  # the last step sent nothing
                self._event.synchronize()
                self._send()
            self._event.synchronize()
        self._arrived()
        found: dict[int, int] = {}
        for layer, count in zip(self._layers, self._latest, strict=True):
            found[layer] = found.get(layer, 0) + count
        return found

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

"""Count dropped tokens and measure loads on the device, with few kernels.

A kernel on a few numbers takes about 2 us in a graph, in every layer of every microbatch. So a
layer only registers its flags, and one sum over all layers of a chunk runs at the end of the
chunk's forward. The load of experts matters only if there was no room for tokens; such a step runs
again, and only then is the load measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.megatron.core.backward_pass import is_in_backward

__all__ = ["LOAD_OF", "DropCounts", "HeaviestLoad"]

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

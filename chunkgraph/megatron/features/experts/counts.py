"""What is counted of tokens and experts on the device: as little as a graph can do with.

A kernel of a few numbers takes a graph about 2 us, in every layer of every microbatch. So a layer
only hands over what it found, and what all layers of a chunk found is added up once, at the end of
the chunk's forward. How uneven the tokens were is of interest only where there was no room for
them, and such a step is run anew: then it is followed, and in no other step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chunkgraph.megatron.core.backward_pass import is_in_backward

__all__ = ["LOAD_OF", "DropCounts", "HeaviestLoad"]

LOAD_OF = 1 << 20
"""Tokens that a load is told of: ranks agree on whole numbers."""


class DropCounts:
    """Counts by layer, on the device; they only grow.

    Args:
        num_layers: how many.
        device: where.

    Attributes:
        total: shape [num_layers], int64.
        is_recomputed: whether something was seen to be counted in a backward.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.total = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self.is_recomputed = False
        self._found: list[tuple[int, torch.Tensor]] | None = None

    def add(self, layer: int, found: torch.Tensor) -> None:
        """Count what of ``found``, of any shape and of type bool or integer, is not zero.

        In a forward at its end, else (a layer outside of what is captured, a layer that is computed
        anew in the backward) at once.
        """
        if is_in_backward():
            self.is_recomputed = True
        elif self._found is not None:
            self._found.append((layer, found))
            return
        self._add_up([(layer, found)])

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward of a chunk."""
        before, self._found = self._found, []
        try:
            yield
            found = self._found
        finally:
            self._found = before
        for alike in _runs(found):
            self._add_up(alike)

    def _add_up(self, found: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Of layers that follow each other, each with a tensor of the same shape and type."""
        first = found[0][0]
        with torch.no_grad():
            flat = [tensor.detach().reshape(-1) for _, tensor in found]
            counts = torch.stack(flat) if len(flat) > 1 else flat[0].unsqueeze(0)
            if counts.dtype is not torch.bool:
                counts = counts != 0
            counts = counts.sum(1) if counts.shape[1] != 1 else counts.squeeze(1)
            self.total[first : first + len(found)].add_(counts)


class HeaviestLoad:
    """The most that microbatches of a step asked of one expert, or of one rank, by their tokens.

    Attributes:
        is_followed: whether this step's are to be noted.
    """

    def __init__(self) -> None:
        self.is_followed = False
        self._most: torch.Tensor | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around an eager step in which all tokens have room; a load of before is forgotten."""
        self._most, self.is_followed = None, True
        try:
            yield
        finally:
            self.is_followed = False

    def add(self, num_tokens: int | torch.Tensor, asked: torch.Tensor) -> None:
        """Note what a microbatch asked.

        Args:
            num_tokens: of the microbatch on this rank.
            asked: the most of one expert or rank, one number, on any device, always the same.
        """
        least_one = torch.as_tensor(num_tokens, device=asked.device).clamp(min=1)
        load = -(-asked.to(torch.int64) * LOAD_OF // least_one)
        self._most = load if self._most is None else torch.maximum(self._most, load)

    def take(self) -> int:
        """How many of `LOAD_OF` tokens that is, rounded up, and forget it; waits for the device."""
        most, self._most = self._most, None
        return 0 if most is None else int(most)


def _runs(
    found: Sequence[tuple[int, torch.Tensor]],
) -> Iterator[Sequence[tuple[int, torch.Tensor]]]:
    """In their order, as many as can be added up together."""
    begin = 0
    for end in range(1, len(found) + 1):
        if end < len(found):
            (layer, tensor), (before, like) = found[end], found[end - 1]
            if (layer, tensor.shape, tensor.dtype) == (before + 1, like.shape, like.dtype):
                continue
        yield found[begin:end]
        begin = end

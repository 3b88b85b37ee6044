"""Poison mode: memory that must not be read any more is filled with NaN.

Scratch is dead before every replay, a slot's pool is dead from the end of its backward to its next
forward. In a right plan poison changes no result; in a wrong one NaN shows in the loss at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chunkgraph.graphs import AddressRanges, Pool, tensor_at

__all__ = ["Poison"]


class Poison:
    """Fills dead memory around replays.

    Args:
        scratch: the pool shared by all backwards, or None when there is none.
        device: of all pools.
        kept: what of a pool is alive as long as its graphs, such as a mask that a module made in
            the capture; it is never filled.
    """

    def __init__(
        self, scratch: Pool | None, device: torch.device, kept: Mapping[Pool, AddressRanges]
    ) -> None:
        self._scratch = scratch
        self._device = device
        self._kept = kept
        self._dead: list[Pool] = []

    def before_replay(self) -> None:
        """Nothing of an earlier replay may still be in scratch."""
        if self._scratch is not None:
            self._fill(self._scratch)
        while self._dead:
            self._fill(self._dead.pop())

    def after_backward(self, slot_pool: Pool, *, holds_grads: bool) -> None:
        """The slot is free: its saved tensors and its output are dead.

        Args:
            slot_pool: the slot's pool.
            holds_grads: whether input gradients lie in it too. They live until the next replay;
                the slot is then filled at that replay instead.
        """
        if holds_grads:
            self._dead.append(slot_pool)
        else:
            self._fill(slot_pool)

    def _fill(self, pool: Pool) -> None:
        kept = self._kept.get(pool)
        if not kept:
            pool.poison()
            return
        for area in pool.reserved() - kept:
            tensor_at(area.start, area.end - area.start, self._device).fill_(0xFF)

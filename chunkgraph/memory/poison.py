"""Poison mode: fill dead memory, which must not be read, with NaN.

Scratch is dead before every replay. A slot's pool is dead from the end of its backward to its next
forward. With a correct plan, poison changes no result; with a wrong one, the loss becomes NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chunkgraph.graphs import AddressRanges, Pool, tensor_at

__all__ = ["Poison"]


class Poison:
    """Fill dead memory around replays.

    Args:
        scratch: The pool that all backwards share; None if there is none.
        device: Device of all pools.
        permanent: Addresses in each pool that live as long as its graphs, such as a mask that a
            module created in the capture; they are never filled.
    """

    def __init__(
        self, scratch: Pool | None, device: torch.device, permanent: Mapping[Pool, AddressRanges]
    ) -> None:
        self._scratch = scratch
        self._device = device
        self._permanent = permanent
        self._dead: list[Pool] = []

    def before_replay(self) -> None:
        """Fill scratch, and the pools whose input gradients are dead now."""
        if self._scratch is not None:
            self._fill(self._scratch)
        while self._dead:
            self._fill(self._dead.pop())

    def after_backward(self, slot_pool: Pool, *, holds_grads: bool) -> None:
        """Fill the pool of a slot that is free; its saved tensors and its output are dead.

        Args:
            slot_pool: The slot's pool.
            holds_grads: Whether the pool also contains input gradients. They live until the next
                replay, which then fills the pool.
        """
        if holds_grads:
            self._dead.append(slot_pool)
        else:
            self._fill(slot_pool)

    def _fill(self, pool: Pool) -> None:
        permanent = self._permanent.get(pool)
        if not permanent:
            pool.poison()
            return
        for area in pool.reserved() - permanent:
            tensor_at(area.start, area.end - area.start, self._device).fill_(0xFF)

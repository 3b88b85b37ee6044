"""Poison mode: memory that must not be read any more is filled with NaN.

Scratch is dead before every replay, a slot's pool is dead from the end of its backward to its next
forward. In a right plan poison changes no result; in a wrong one NaN shows in the loss at once.
"""

from __future__ import annotations

from chunkgraph.graphs import Pool

__all__ = ["Poison"]


class Poison:
    """Fills dead memory around replays.

    Args:
        scratch: the pool shared by all backwards, or None when there is none.
    """

    def __init__(self, scratch: Pool | None) -> None:
        self._scratch = scratch
        self._dead: list[Pool] = []

    def before_replay(self) -> None:
        """Nothing of an earlier replay may still be in scratch."""
        if self._scratch is not None:
            self._scratch.poison()
        while self._dead:
            self._dead.pop().poison()

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
            slot_pool.poison()

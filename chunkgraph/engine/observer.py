"""Follow every replay of a rank from outside: verification and profiler ranges do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from chunkgraph.engine.slot import Slot

__all__ = ["Action", "Observer"]

Action = Literal["F", "B", "I", "W"]
"""A replay: forward, whole backward, or the input and the weight half of a split one."""


class Observer:
    """Override the methods that are needed; by default all do nothing."""

    def begin_step(self, step: int) -> None:
        """Begin a step.

        Args:
            step: Number of the replayed step after the capture, from 0.
        """

    def before(self, action: Action, slot: Slot, tensors: Sequence[torch.Tensor | None]) -> None:
        """Follow a replay that is about to load its inputs.

        Args:
            action: The replay to come.
            slot: The slot.
            tensors: The call's tensor arguments, or the gradients of the outputs; none for ``W``.
        """

    def after(self, action: Action, slot: Slot) -> None:
        """Follow a replay that the host has launched, before the caller gets the results."""

    def end_step(self) -> None:
        """End the step, after success or failure."""

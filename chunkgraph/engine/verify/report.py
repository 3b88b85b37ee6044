"""The errors and warnings of the verify modes."""

from __future__ import annotations

import warnings

from chunkgraph.engine.slot import Slot
from chunkgraph.errors import VerifyError

__all__ = ["Replayed", "difference", "stale_memory", "warn_of_nan"]

_FORWARD_CAUSES = (
    "  To do: look there for state that changes outside of the graph: a Python number or flag that "
    "the chunk reads, a tensor that is replaced instead of updated in place, memory that other "
    "code writes. Keep such state in tensors updated in place, or out of the chunk."
)
_BACKWARD_CAUSES = (
    "  To do: look for writes to the slot between its forward and its backward (an input or "
    "output changed in place, a tensor of the previous step that is still in use), or for Python "
    "state that the backward reads."
)


class Replayed:
    """The description of a replay in messages.

    Args:
        slot: the slot.
        direction: ``forward`` or ``backward``.
        microbatch: microbatch of the chunk in this step, from 0.
        step: replayed step after the capture, from 0.
    """

    def __init__(self, slot: Slot, direction: str, microbatch: int, step: int) -> None:
        self._text = (
            f"{slot.label}: the replayed {direction} of microbatch {microbatch} in replayed step "
            f"{step} after the capture"
        )
        self.advice = _FORWARD_CAUSES if direction == "forward" else _BACKWARD_CAUSES

    def __str__(self) -> str:
        return self._text


def difference(replayed: Replayed, what: str, layer: str) -> VerifyError:
    """Return the error for a replay that differs from an eager pass on the same inputs."""
    return VerifyError(
        f"{replayed} differs from an eager one on the same inputs and random state.\n"
        f"  {what}\n  first layer that differs: {layer}\n{replayed.advice}"
    )


def stale_memory(replayed: Replayed, what: str, layer: str) -> VerifyError:
    """Return the error for a NaN that a replay has but an eager pass on its inputs does not."""
    return VerifyError(
        f"{replayed} has a NaN where an eager one on the same inputs has none: it read memory "
        f"that was no longer its own.\n  {what}\n  first layer with a NaN: {layer}\n"
        f"{replayed.advice}"
    )


def warn_of_nan(replayed: Replayed, where: str) -> None:
    """Warn of a NaN that eager training would have too."""
    warnings.warn(
        f"{replayed} has a NaN, as eager training would have: {where}. Later NaNs give no warning.",
        stacklevel=2,
    )

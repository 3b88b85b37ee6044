"""What the verify modes say."""

from __future__ import annotations

import warnings

from chunkgraph.engine.slot import Slot
from chunkgraph.errors import VerifyError

__all__ = ["Replayed", "difference", "stale_memory", "warn_of_nan"]

_FORWARD_CAUSES = (
    "  To do: look there for what changes without the graph knowing: a Python number or flag that "
    "the chunk reads, a tensor that is replaced instead of updated in place, memory that "
    "somebody else writes. Keep such state in tensors updated in place, or out of the chunk."
)
_BACKWARD_CAUSES = (
    "  To do: look for what wrote to the slot between its forward and its backward (an input or "
    "output changed in place, a tensor of the step before that is still used), or for Python "
    "state that the backward reads."
)


class Replayed:
    """Which replay is spoken of.

    Args:
        slot: replayed.
        direction: ``forward`` or ``backward``.
        microbatch: how many the chunk had before in this step.
        step: replayed steps since the capture, before this one.
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
    """A replay that is not what an eager pass on the same inputs gives."""
    return VerifyError(
        f"{replayed} differs from an eager one on the same inputs and random state.\n"
        f"  {what}\n  first layer that differs: {layer}\n{replayed.advice}"
    )


def stale_memory(replayed: Replayed, what: str, layer: str) -> VerifyError:
    """A NaN in a replay, where an eager pass on the same inputs gives none."""
    return VerifyError(
        f"{replayed} has a NaN where an eager one on the same inputs has none: it read memory "
        f"that was not its own any more.\n  {what}\n  first layer with a NaN: {layer}\n"
        f"{replayed.advice}"
    )


def warn_of_nan(replayed: Replayed, where: str) -> None:
    """A NaN that eager training would have as well."""
    warnings.warn(
        f"{replayed} has a NaN, as eager training would have: {where}. Later ones are not told.",
        stacklevel=2,
    )

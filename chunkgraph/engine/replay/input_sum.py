"""Sums of input gradients that eager training adds in another order.

A chunk may read an input several times, as residual connections do. Eager training adds each of
these gradients to what autograd has for the tensor; a replay returns their sum. The bits are the
same unless another operator's gradient for the tensor came first.
"""

from __future__ import annotations

import torch

from chunkgraph.engine.watch.registered_hooks import register_first
from chunkgraph.errors import ReplayMismatchError

__all__ = ["InputSum"]


class InputSum:
    """The gradient that one replay returns for one input, until autograd uses it.

    Args:
        label: Label of the slot, for errors.
        index: Number of the input among the call's tensors, for errors.
        tensor: The caller's tensor, which requires grad.

    Attributes:
        address: Address of the gradient that the replay returned; None before that.
    """

    __slots__ = ("_handle", "_index", "_label", "address")

    def __init__(self, label: str, index: int, tensor: torch.Tensor) -> None:
        self._label, self._index = label, index
        self.address: int | None = None
        self._handle = register_first(tensor, self._check)

    def _check(self, gradient: torch.Tensor) -> None:
        """Check what autograd has summed for the tensor.

        Autograd adds to the gradient that came first, in place.

        Raises:
            ReplayMismatchError: Another gradient came before that of the replay.
        """
        if self.address is None:  # in the backward of another reader
            return
        self._handle.remove()
        if gradient.data_ptr() != self.address:
            raise ReplayMismatchError(
                f"{self._label}: another operator reads its input tensor {self._index} too, and "
                "its gradient comes first. The chunk reads that tensor several times (a residual "
                "connection, for example): eager training adds each of these gradients to the "
                "other operator's, a replay adds their sum, so the last bits would differ.\n"
                "  To do: let the other operator read the tensor before the chunk is called, "
                "move it into the chunk, or ask for an eager step (`step(eager=True)`)."
            )

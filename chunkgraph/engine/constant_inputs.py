"""Inputs that do not change, and how a static input knows that it holds them already.

torch counts the writes into a tensor (``_version``), views included. But a write through
``.data``, by a collective, by another graph's replay or by a kernel that torch does not know is
not counted. So equal counts prove equal values only for a tensor that nothing of that kind writes,
which only its owner can tell: by `mark_constant`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LoadedSource", "mark_constant"]

_MARK = "_chunkgraph_unchanging"


def mark_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Promise that only ordinary torch operators ever write ``tensor``, if anything does.

    Given again and again as an argument of a captured chunk, it is then copied into each slot
    once, and once more after every write. Meant for masks, position ids and tables that are made
    once and used by many microbatches. The promise is broken by a write through ``.data`` or
    numpy, as the target of a collective or of a graph's replay, by a kernel of one's own, or in
    the chunk itself.

    Args:
        tensor: this very object must be passed to the chunk; an alias of it carries no promise.

    Returns:
        The same object.
    """
    if not tensor.is_inference():  # those have no count of writes; they are copied as ever
        setattr(tensor, _MARK, True)
    return tensor


@dataclass(frozen=True)
class LoadedSource:
    """The tensor that a static input was last loaded from, as it was then.

    Attributes:
        tensor: held, so that no other tensor can take its identity or its memory.
        version: its count of writes.
        address: of its first element; assigning ``.data`` moves it and counts no write.
    """

    tensor: torch.Tensor
    version: int
    address: int

    @staticmethod
    def of(tensor: torch.Tensor) -> LoadedSource | None:
        """What to remember of ``tensor``; None if nothing is promised of it."""
        if not hasattr(tensor, _MARK):
            return None
        return LoadedSource(tensor, tensor._version, tensor.data_ptr())

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` holds the very values that were loaded."""
        return (
            tensor is self.tensor
            and tensor._version == self.version
            and tensor.data_ptr() == self.address
        )

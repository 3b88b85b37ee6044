"""Constant inputs, which a slot loads only once.

torch counts the writes to a tensor (``_version``), including those to views. It does not count
writes through ``.data``, by a collective, by another graph's replay or by a kernel that torch does
not know. So equal counts prove equal values only for a tensor without such writes, which its owner
must promise by `mark_constant`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_MARK = "_chunkgraph_constant"


def mark_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Promise that only ordinary torch operators write to ``tensor``, if any do.

    As an argument of a captured chunk it is then copied into each slot only once, and again after
    every write. Meant for masks, position ids and tables that many microbatches share. The promise
    is broken by writes through ``.data`` or NumPy, by a collective or a graph's replay, by a custom
    kernel, or in the chunk itself.

    Args:
        tensor: the object to pass to the chunk; an alias of it is not constant.

    Returns:
        The same object.
    """
    if not tensor.is_inference():  # inference tensors have no version counter: always copied
        setattr(tensor, _MARK, True)
    return tensor


class LoadedSource(NamedTuple):
    """The tensor from which a static input was last loaded, and its count of writes then.

    The reference keeps the tensor's id and memory from being reused.
    """

    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(tensor: torch.Tensor) -> LoadedSource | None:
        """Return the record of a constant tensor; None for other tensors."""
        return LoadedSource(tensor, tensor._version) if hasattr(tensor, _MARK) else None

    def is_still(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` still holds the values that were loaded."""
        return tensor is self.tensor and tensor._version == self.version

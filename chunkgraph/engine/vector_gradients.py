"""Gradients of vectors (norm weights, biases), added to their sinks together.

One by one, each is a kernel of a few thousand elements between two that take tens of
microseconds: the space between two kernels of a graph costs as much as the kernel. So they are
kept, a few KB each, until the backward ends, and take two launches in all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

__all__ = ["VectorGradients", "load_kernels"]

_MAX_ELEMENTS = 1 << 16
"""Of a vector that is kept; a longer one is worth a kernel of its own."""


class VectorGradients:
    """What one backward has yet to add."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, index: int, sink: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Keep ``gradient`` for parameter ``index``; False: it is not such a vector.

        Nor is one whose memory somebody else holds too, and may write before the backward ends.
        Two gradients of one parameter (recomputation) are added in the order they came in.
        """
        if gradient.ndim > 1 or gradient.numel() > _MAX_ELEMENTS or sink.shape != gradient.shape:
            return False
        if not _is_sole_owner(gradient):
            return False
        if index in self._waiting:
            self.add_all()
        self._waiting[index] = (sink, gradient)
        return True

    def add_all(self) -> None:
        """Add what was kept, each gradient rounded as ``sink.add_(gradient)`` rounds it.

        A conversion to a wider type is exact, so that converting first changes no bit; where the
        sink is the narrower one, nothing is converted.
        """
        kinds: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]]
        kinds = defaultdict(list)
        for sink, gradient in self._waiting.values():
            kinds[sink.dtype, gradient.dtype].append((sink, gradient))
        self._waiting.clear()
        with torch.no_grad():
            for (to, dtype), pairs in kinds.items():
                sinks, gradients = ([pair[i] for pair in pairs] for i in (0, 1))
                if to != dtype and torch.promote_types(to, dtype) == to:
                    wide = [torch.empty_like(sink) for sink in sinks]
                    torch._foreach_copy_(wide, gradients)
                    gradients = wide
                torch._foreach_add_(sinks, gradients)


def load_kernels(kinds: Iterable[tuple[torch.dtype, torch.dtype]], device: torch.device) -> None:
    """Run once for each pair of a sink's and a gradient's dtype: no capture may load a kernel."""
    vectors = VectorGradients()
    for index, (to, dtype) in enumerate(sorted(set(kinds), key=str)):
        sink, gradient = (torch.zeros(8, dtype=kind, device=device) for kind in (to, dtype))
        vectors.take(index, sink, gradient)
    vectors.add_all()


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor lies in its memory."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor's, and ``storage``

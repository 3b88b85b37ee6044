"""Which outputs of a forward get a gradient, and of what layout, in its backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.layout import dense_strides
from chunkgraph.engine.signature import Call

__all__ = ["OutputGradients"]


@dataclass(frozen=True)
class OutputGradients:
    """The gradients that a backward is given.

    Attributes:
        receiving: positions, among the tensors of the result, of outputs that get one.
        strides: of each.
        autocast: how operators are cast in the backward; None: as it is.
        has_layouts: whether a warmup step had them with these strides.
    """

    receiving: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    autocast: Autocast | None
    has_layouts: bool

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], sample: Call) -> OutputGradients:
        """Return those of the backward that ``sample`` had; by default each output gets one.

        Args:
            tensors: of the result, each once.
            sample: the call.
        """
        positions = [i for i, t in enumerate(tensors) if t.requires_grad]
        strides: Sequence[tuple[int, ...] | None] = [dense_strides(tensors[i]) for i in positions]
        backward = sample.backward
        autocast, has_layouts = None, False
        if backward is not None and backward.strides is not None:
            autocast, has_layouts, strides = backward.autocast, True, backward.strides
        received = [(i, s) for i, s in zip(positions, strides, strict=True) if s is not None]
        return OutputGradients(
            tuple(i for i, _ in received), tuple(s for _, s in received), autocast, has_layouts
        )

    def casting(self) -> AbstractContextManager[None]:
        """Inside, operators are cast as in the backward."""
        return self.autocast.entered() if self.autocast is not None else nullcontext()

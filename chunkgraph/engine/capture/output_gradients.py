"""The gradients that the outputs of a forward get in its backward, and their layouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from chunkgraph.engine.autocast import Autocast
from chunkgraph.engine.layout import dense_strides
from chunkgraph.engine.tree import Call

__all__ = ["OutputGradients"]


@dataclass(frozen=True)
class OutputGradients:
    """The gradients that enter a backward.

    Attributes:
        receiving: positions, among the tensors of the result, of outputs that get a gradient.
        strides: strides of each of these gradients.
        autocast: autocast setting of the backward; None: the current one.
        has_layouts: whether the strides were observed in a warmup step.
    """

    receiving: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    autocast: Autocast | None
    has_layouts: bool

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], sample: Call) -> OutputGradients:
        """Return the gradients observed in the sample's backward; by default, one per output.

        Args:
            tensors: tensors of the result, each once.
            sample: the sampled call.
        """
        positions = [i for i, t in enumerate(tensors) if t.requires_grad]
        strides: Sequence[tuple[int, ...] | None] = [dense_strides(tensors[i]) for i in positions]
        backward = sample.backward
        autocast, has_layouts = None, False
        if backward is not None:
            autocast = backward.autocast
        if backward is not None and backward.strides is not None:
            has_layouts, strides = True, backward.strides
        received = [(i, s) for i, s in zip(positions, strides, strict=True) if s is not None]
        return OutputGradients(
            tuple(i for i, _ in received), tuple(s for _, s in received), autocast, has_layouts
        )

    def casting(self) -> AbstractContextManager[None]:
        """Apply the backward's autocast setting in this block."""
        return self.autocast.entered() if self.autocast is not None else nullcontext()

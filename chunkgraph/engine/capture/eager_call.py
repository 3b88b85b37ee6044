"""Eager passes over a sampled call: a forward whose backward runs once, from fixed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from chunkgraph.engine.capture.output_gradients import OutputGradients
from chunkgraph.engine.capture.static_inputs import call_with, static_like
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import span
from chunkgraph.engine.tree import Call, distinct_tensors, flatten

__all__ = ["EagerCall", "GradientOrder", "fill_test_gradient"]


class EagerCall:
    """An eager pass over a sampled call: its forward, then its backward, each once.

    Args:
        chunk: runs the forward.
        sample: the call; its values are copied.
        inputs: its tensors for this pass; None: copies of the sample's.

    Attributes:
        inputs: the tensors of this pass.
        leaves: the leaves of the result, from `forward` to `backward`.
    """

    def __init__(
        self, chunk: Chunk, sample: Call, inputs: Sequence[torch.Tensor] | None = None
    ) -> None:
        self._chunk, self._sample = chunk, sample
        self._results: dict[int, torch.Tensor] = {}
        self._grads: list[torch.Tensor] = []
        self.inputs = inputs or [static_like(t) for t in sample.tensors]
        self.leaves: Sequence[Any] = ()

    def forward(self) -> EagerCall:
        """Run the forward."""
        result = call_with(self._chunk, self._sample, self.inputs, self._results)
        self.leaves = flatten(result)[0]
        self._gradients = OutputGradients.of(self.tensors, self._sample)
        return self

    def casting(self) -> AbstractContextManager[None]:
        """Apply the backward's autocast setting in this block."""
        return self._gradients.casting()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the result, each once."""
        return distinct_tensors(self.leaves)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Return the tensors of the result that get a gradient."""
        tensors = self.tensors
        return [tensors[i] for i in self._gradients.receiving]

    def make_output_grads(self) -> None:
        """Make the gradients that the backward begins with, filled by `fill_test_gradient`."""
        for output, strides in zip(self.outputs, self._gradients.strides, strict=True):
            size = span(output.shape, strides)
            memory = torch.empty(size, dtype=output.dtype, device=output.device)
            self._grads.append(memory.as_strided(output.shape, strides))
            fill_test_gradient(self._grads[-1])

    def backward(self, grads: Sequence[torch.Tensor] | None = None) -> None:
        """Run the backward from ``grads``, or from those made, and drop the result."""
        outputs, self.leaves = self.outputs, ()
        # Not autograd.grad, which forbids the inner backwards of recomputation.
        torch.autograd.backward(outputs, self._grads if grads is None else grads)

    def input_grads(self) -> list[torch.Tensor | None]:
        """Return the gradient of each input, or None."""
        return [self._results.get(id(t), t.grad) for t in self.inputs]


@dataclass
class GradientOrder:
    """Records the order in which gradients are accumulated (a `GradientMarker`)."""

    seen: list[int] = field(default_factory=list)

    def accumulated(self, index: int) -> None:
        """See `GradientMarker`."""
        self.seen.append(index)

    def replayed(self) -> None:
        """See `GradientMarker`; an eager pass is not replayed."""
        raise AssertionError


def fill_test_gradient(gradient: torch.Tensor) -> None:
    """Fill the memory of an output gradient with values that change from element to element."""
    memory = gradient.as_strided((span(gradient.shape, gradient.stride()),), (1,))
    memory.fill_(1)
    for period, factor in ((2, -0.5), (3, 0.75), (5, -0.25)):
        memory[period - 1 :: period].mul_(factor)

"""Passes of a sampled call through a chunk: eager ones, and those that a capture records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from chunkgraph.engine.capture.output_gradients import OutputGradients
from chunkgraph.engine.capture.static_inputs import call_with, static_like
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.layout import span
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import Call, distinct_tensors, flatten


class Pass:
    """One forward of a sampled call, and its backward from fixed gradients, each run once.

    Args:
        chunk: runs the forward.
        sample: the call.
        inputs: the tensors of the call; None: copies of the sample's.

    Attributes:
        leaves: the leaves of the result, from `forward` to `backward`.
        spec: structure of the result.
        grads: the gradients of `outputs` that the backward begins with, once they are made.
    """

    def __init__(
        self, chunk: Chunk, sample: Call, inputs: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.chunk, self.sample = chunk, sample
        self.inputs = [static_like(t) for t in sample.tensors] if inputs is None else list(inputs)
        self.leaves: Sequence[Any] = ()
        self.spec: TreeSpec
        self.grads: list[torch.Tensor] = []
        self._non_leaf_grads: dict[int, torch.Tensor] = {}

    def forward(self) -> Pass:
        """Run the forward."""
        result = call_with(self.chunk, self.sample, self.inputs, self._non_leaf_grads)
        leaves, self.spec = flatten(result)
        if not self.chunk.enables_grad:  # Megatron makes leaves of results
            own = {id(t): t.detach() for t in distinct_tensors(leaves) if t.requires_grad}
            leaves = [own.get(id(leaf), leaf) for leaf in leaves]
        self.leaves = leaves
        return self

    @cached_property
    def gradients(self) -> OutputGradients:
        """Return the gradients that enter the backward. Not while the forward is captured."""
        return OutputGradients.of(self.tensors, self.sample)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the result, each once."""
        return distinct_tensors(self.leaves)

    @property
    def outputs(self) -> list[torch.Tensor]:
        """Return the tensors of the result that get a gradient."""
        tensors = self.tensors
        return [tensors[i] for i in self.gradients.receiving]

    def make_output_grads(self, slot: Slot | None = None) -> None:
        """Make the gradients that the backward begins with.

        Args:
            slot: owns their memory, filled with zeros; None: they are new, and filled by
                `fill_test_gradient`.
        """
        pairs = zip(self.outputs, self.gradients.strides, strict=True)
        for i, (output, strides) in enumerate(pairs):
            if slot is not None:
                self.grads.append(slot.memory.statics.gradient_like(i, output, strides))
                continue
            size = span(output.shape, strides)
            memory = torch.empty(size, dtype=output.dtype, device=output.device)
            self.grads.append(memory.as_strided(output.shape, strides))
            fill_test_gradient(self.grads[-1])

    def backward(self, *, keeps_leaves: bool = False) -> None:
        """Run the backward from ``grads``, and drop the result unless ``keeps_leaves``."""
        outputs = self.outputs
        if not keeps_leaves:
            self.leaves = ()
        # Not autograd.grad, which forbids the inner backwards of recomputation.
        torch.autograd.backward(outputs, self.grads)

    def input_grads(self) -> list[torch.Tensor | None]:
        """Return the gradient of each input, or None."""
        return [self._non_leaf_grads.get(id(t), t.grad) for t in self.inputs]

    def take_input_grads(self) -> list[torch.Tensor | None]:
        """Return the gradient of each input, or None, and drop it here."""
        grads = self.input_grads()
        self._non_leaf_grads.clear()
        for tensor in self.inputs:
            tensor.grad = None
        return grads


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

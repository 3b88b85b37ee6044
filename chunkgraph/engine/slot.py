"""One slot: a chunk's static buffers and the forward and backward graph on them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.engine.signature import unflatten
from chunkgraph.engine.unchanging import LoadedSource
from chunkgraph.graphs import Graph, Pool

__all__ = ["Slot"]


@dataclass(eq=False)
class Slot:
    """A captured slot. All tensors are fixed in memory until the slot is released.

    Attributes:
        chunk: index of the chunk on its rank.
        index: number of the slot in its chunk.
        bank: key of the bank that this variant of the slot belongs to.
        inputs: static inputs, one for each tensor argument; a replay reads them.
        outputs: leaves of the result. Tensors are valid from this slot's forward replay to its
            next one.
        output_spec: structure of the result.
        differentiable: which tensors among ``outputs`` take a gradient, by position among tensors.
        output_grads: static gradients of those; the backward replay reads them.
        input_grads: gradients of ``inputs`` (None where there is none); valid until the next
            replay of any backward, or of any graph under the plan ``shared_temporaries``.
        pool: where the forward's memory lies.
        grads_lie_in_pool: whether an input gradient lies there too (a compiled backward may write
            it over a saved tensor).
        marker: watches the gradients of the backward, or None.
        keeps_input_grads: see `Chunk`.
        copies_outputs: whether the result that is handed out has memory of its own.
        turn: tells the microbatch that took the slot last from all others.
    """

    chunk: int
    index: int
    label: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[Any, ...]
    output_spec: TreeSpec
    differentiable: tuple[int, ...]
    output_grads: tuple[torch.Tensor, ...]
    input_grads: tuple[torch.Tensor | None, ...]
    forward_graph: Graph
    backward_graph: Graph | None
    pool: Pool
    grads_lie_in_pool: bool = False
    marker: GradientMarker | None = None
    keeps_input_grads: bool = True
    copies_outputs: bool = False
    bank: Hashable = None
    turn: int = 0

    def __post_init__(self) -> None:
        self.is_single = self.output_spec.is_leaf() and isinstance(self.outputs[0], torch.Tensor)
        self.output_tensors = tuple(x for x in self.outputs if isinstance(x, torch.Tensor))
        self.differentiable_inputs = tuple(
            i for i, grad in enumerate(self.input_grads) if grad is not None
        )
        self._places = [(t.data_ptr(), t.stride()) for t in self.inputs]
        self._sources: list[LoadedSource | None] = [None] * len(self.inputs)
        self.has_frozen_outputs = len(self.differentiable) < len(self.output_tensors)

    def load_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a call's tensors into the static inputs (those that are not there already).

        There already is what was received into the static input itself, and an unchanging tensor
        that this input was last loaded from. Skipping the latter is safe: it is the same object
        (held, so neither its identity nor its address can be another's by now), nothing was
        written into it since (its owner promised that torch counts every write), and nothing but
        this method writes a static input: it lies outside all pools, so neither replays nor poison
        reach it, and whoever receives into it passes it here, which forgets the source.
        """
        sources = self._sources
        statics: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for i, given in enumerate(tensors):
            source = sources[i]
            if source is not None:
                if source.is_still(given):
                    continue
                sources[i] = None
            address, stride = self._places[i]
            if given.data_ptr() != address:
                statics.append(self.inputs[i])
                copied.append(given)
                sources[i] = LoadedSource.of(given)
            elif given.stride() != stride:  # a view of what was received
                statics.append(self.inputs[i])
                copied.append(given.clone())
        if len(copied) == 1:
            statics[0].copy_(copied[0])
        elif copied:  # one launch for all that have one dtype
            torch._foreach_copy_(statics, copied)

    def forget_sources(self) -> None:
        """Load every input anew next time: a step ended between a receive and its forward."""
        self._sources = [None] * len(self.inputs)

    def load_output_grads(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Copy the gradients of the differentiable outputs; a missing one is zero."""
        for static, position in zip(self.output_grads, self.differentiable, strict=True):
            given = grads[position]
            if given is None:
                static.zero_()
            elif static.data_ptr() != given.data_ptr():
                static.copy_(given)
            elif static.stride() != given.stride():  # a view of what was received
                static.copy_(given.clone())

    def result(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The chunk's result with ``tensors`` in the places of its tensors."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.outputs]
        return unflatten(leaves, self.output_spec)

    def release(self) -> None:
        """Drop the graphs; the buffers go with the slot."""
        self.forward_graph.release()
        if self.backward_graph is not None:
            self.backward_graph.release()

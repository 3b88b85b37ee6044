"""Record, during the capture, the tensors that each slot keeps for its backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.preserved import regions
from chunkgraph.engine.capture.saved import SavedTensor, saved_tensors
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import flatten, flatten_call
from chunkgraph.graphs import AddressRanges, GraphBackend

__all__ = ["SavedRecords", "memory_of"]


class SavedRecords:
    """The addresses and layers of the tensors that each slot's forward keeps.

    Attributes:
        bank: the bank being captured.
    """

    def __init__(self) -> None:
        # By bank, chunk and address of the call's first tensor, a static input of the slot.
        self._by_input: dict[tuple[Hashable, str, int], tuple[SavedTensor, ...]] = {}
        self.bank: Hashable = None
        self._written: dict[str, dict[int, torch.Tensor]] = {}

    def recording(self, chunk: Chunk) -> Chunk:
        """Return ``chunk`` with a forward that is recorded here."""
        return replace(chunk, forward=self._recorded_forward(chunk))

    def of(self, slot: Slot, chunk: Chunk) -> tuple[SavedTensor, ...]:
        """Return the tensors that ``slot`` keeps; empty if it has no tensor argument."""
        if not slot.inputs.tensors:
            return ()
        return self._by_input.get((slot.bank, chunk.label, slot.inputs.tensors[0].data_ptr()), ())

    def written(self, chunk: Chunk) -> tuple[torch.Tensor, ...]:
        """Return the tensors, other than buffers, that the chunk's forward updated in place."""
        return tuple(self._written.get(chunk.label, {}).values())

    def _recorded_forward(self, chunk: Chunk) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            watch = LayerWatch()
            versions = [(r, r._version) for r in regions(chunk) if not r.is_inference()]
            with watch.watching([chunk]):
                result = chunk.forward(*args, **kwargs)
            buffers = {b.data_ptr() for b in chunk.buffers}
            self._written.setdefault(chunk.label, {}).update(
                (r.data_ptr(), r)
                for r, version in versions
                if r._version != version and r.data_ptr() not in buffers
            )
            inputs = flatten_call(args, kwargs).tensors
            if inputs:
                saved = saved_tensors(flatten(result)[0], watch)
                key = (self.bank, chunk.label, inputs[0].data_ptr())
                self._by_input[key] = tuple(s.without_tensor() for s in saved)
            return result

        return forward


def memory_of(slot: Slot, backend: GraphBackend) -> AddressRanges:
    """Return the memory that exists as long as the slot: its pool and its inputs."""
    memory = slot.block.pool.reserved()
    for tensor in slot.inputs.tensors:
        memory = memory | backend.raw(tensor)
    return memory

"""What each captured slot keeps for its backward, noted while it is captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from chunkgraph.engine.capture.layers import LayerWatch
from chunkgraph.engine.capture.preserved import regions
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import flatten, flatten_call
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.saved import SavedTensor, saved_tensors
from chunkgraph.graphs import AddressRanges, GraphBackend

__all__ = ["SavedRecords", "memory_of"]


class SavedRecords:
    """By slot, the addresses of what its forward keeps, with the layers that keep it.

    Attributes:
        bank: that is being captured.
    """

    def __init__(self) -> None:
        # By bank, chunk and the address of the call's first tensor, which is a slot's own.
        self._by_input: dict[tuple[Hashable, str, int], tuple[SavedTensor, ...]] = {}
        self.bank: Hashable = None
        self._written: dict[str, dict[int, torch.Tensor]] = {}

    def noting(self, chunk: Chunk) -> Chunk:
        """``chunk``, whose forwards are noted here."""
        return replace(chunk, forward=self._noted(chunk))

    def of(self, slot: Slot, chunk: Chunk) -> tuple[SavedTensor, ...]:
        """What ``slot`` keeps; empty if it has no tensor argument."""
        if not slot.inputs:
            return ()
        return self._by_input.get((slot.bank, chunk.label, slot.inputs[0].data_ptr()), ())

    def written(self, chunk: Chunk) -> tuple[torch.Tensor, ...]:
        """What else than its buffers the chunk's forward has updated in place."""
        return tuple(self._written.get(chunk.label, {}).values())

    def _noted(self, chunk: Chunk) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            watch = LayerWatch()
            before = [(r, r._version) for r in regions(chunk) if not r.is_inference()]
            with watch.watching([chunk]):
                result = chunk.forward(*args, **kwargs)
            known = {b.data_ptr() for b in chunk.buffers}
            self._written.setdefault(chunk.label, {}).update(
                (r.data_ptr(), r)
                for r, version in before
                if r._version != version and r.data_ptr() not in known
            )
            given = flatten_call(args, kwargs).tensors
            if given:
                saved = saved_tensors(flatten(result)[0], watch)
                key = (self.bank, chunk.label, given[0].data_ptr())
                self._by_input[key] = tuple(s.forgotten() for s in saved)
            return result

        return forward


def memory_of(slot: Slot, backend: GraphBackend) -> AddressRanges:
    """Addresses that are there as long as the slot: its pool and its inputs."""
    memory = slot.pool.reserved()
    for tensor in slot.inputs:
        memory = memory | backend.raw(tensor)
    return memory

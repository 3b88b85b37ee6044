"""Poison mode: dead memory holds NaN, and a NaN that a replay brings out is explained at once.

Only then an eager pass is run, to tell a replay that read dead memory from a model that gives a
NaN by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.bits import has_nan
from chunkgraph.engine.verify.records import memory_of
from chunkgraph.engine.verify.report import stale_memory
from chunkgraph.engine.verify.saved import Place, first_nan
from chunkgraph.graphs import AddressRanges, Pool
from chunkgraph.memory import Poison

__all__ = ["PoisonVerifier"]


class PoisonVerifier(Verifier):
    """Fills dead memory around replays and looks for NaN in what they give."""

    def captured(self, rank: CapturedRank) -> None:
        """Learn what memory there is."""
        super().captured(rank)
        gc.collect()  # what is dead is not to count as kept
        backend = self._around.backend
        own: dict[Pool, AddressRanges] = {}
        for slot in (s for slots in rank.slots for s in slots):
            for tensor in (*slot.output_tensors, *slot.input_grads):
                if tensor is not None:
                    own[slot.pool] = own.get(slot.pool, AddressRanges()) | backend.raw(tensor)
        kept = {pool: pool.live() - ranges for pool, ranges in own.items()}
        self._poison = Poison(rank.pools.scratch, backend.device, kept)

    def _forget(self) -> None:
        super()._forget()
        self._kept_nan: dict[Slot, Place | None] = {}
        self._had_nan: list[bool] = []

    def before_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        """Fill what is dead."""
        self._count(slot)
        self._poison.before_replay()

    def after_forward(self, slot: Slot) -> None:
        """Look at the outputs."""
        if not has_nan(slot.output_tensors):
            return
        by_itself = self._first_layer_with_nan(slot, slot.inputs, self._wants_grad(slot))
        if by_itself:
            self._tell_nan(slot, "forward", by_itself)
            return
        layer = self._place(slot) or "behind all that is kept for the backward"
        raise stale_memory(self._replayed(slot, "forward"), "an output has a NaN", str(layer))

    def before_backward(self, slot: Slot, grads: Sequence[torch.Tensor | None]) -> None:
        """Fill what is dead, and look at what the slot keeps while it is there."""
        self._poison.before_replay()
        # What the model itself left in a gradient stays there for all that is added; and memory
        # that no gradient has come to yet may hold anything.
        self._had_nan = self._nan_gradients(slot)
        self._kept_nan[slot] = self._place(slot)
        if has_nan(grads):
            where = "it came with the gradient of the output, from what follows the chunk"
            self._tell_nan(slot, "backward", where)

    def after_backward(self, slot: Slot) -> None:
        """Look at the gradients, then fill the slot; of a half, at the input gradients alone."""
        if slot.weight_graph is None:
            self._look_at_gradients(slot)
        elif has_nan(slot.input_grads):
            self._explain(slot, [False] * len(self._names[slot.chunk]))

    def before_weight(self, slot: Slot) -> None:
        """Fill what is dead; other microbatches have added gradients since."""
        self._poison.before_replay()
        self._had_nan = self._nan_gradients(slot)

    def after_weight(self, slot: Slot) -> None:
        """Look at the gradients, then fill the slot."""
        self._look_at_gradients(slot)

    def _look_at_gradients(self, slot: Slot) -> None:
        found = zip(self._nan_gradients(slot), self._had_nan, strict=True)
        is_new = [has and not had for has, had in found]
        if has_nan(slot.input_grads) or any(is_new):
            self._explain(slot, is_new)
        self._poison.after_backward(slot.pool, holds_grads=slot.grads_lie_in_pool)

    def _nan_gradients(self, slot: Slot) -> list[bool]:
        """For each parameter whether its gradient holds a NaN; waits for the device once."""
        found = [g.detach().isnan().any() for g in self._gradients[slot.chunk]]
        return torch.stack(found).tolist() if found else []

    def _explain(self, slot: Slot, is_new: Sequence[bool]) -> None:
        passes = self._passes_of(slot)
        forward = passes.forward(slot.inputs, self._wants_grad(slot))
        eager = passes.backward(forward, slot.receiving, slot.output_grads, accumulates=False)
        if has_nan([*eager.input_grads, *eager.sums]):
            name = self._first_nan_gradient(slot.chunk, eager.sums, eager.order)
            where = f"the first gradient with a NaN is that of {name or 'an input'}"
            self._tell_nan(slot, "backward", where)
            return
        first = next((i for i in eager.order if is_new[i]), None)
        name = "" if first is None else self._names[slot.chunk][first]
        what = f"the gradient of {name or 'an input'} has a NaN"
        place = self._kept_nan.get(slot)
        layer = str(place) if place is not None else name.rpartition(".")[0] or "unknown"
        raise stale_memory(self._replayed(slot, "backward"), what, layer)

    def _wants_grad(self, slot: Slot) -> list[bool]:
        return [grad is not None for grad in slot.input_grads]

    def _place(self, slot: Slot) -> Place | None:
        records = self._records.of(slot, self._chunks[slot.chunk])
        return first_nan(records, memory_of(slot, self._around.backend))

"""Poison mode: fill dead memory with NaN, and explain a NaN that a replay returns.

Only then does an eager pass run, to distinguish a replay that read dead memory from a model that
produces a NaN by itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from chunkgraph.engine.bits import has_nan
from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.capture.saved import Place, first_nan
from chunkgraph.engine.observer import Action
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.records import memory_of
from chunkgraph.engine.verify.report import stale_memory
from chunkgraph.engine.verify.state import ChunkState
from chunkgraph.graphs import AddressRanges, Pool
from chunkgraph.memory import Poison

__all__ = ["PoisonVerifier"]


class PoisonVerifier(Verifier):
    """Fill dead memory around replays, and look for NaN in their results."""

    def captured(self, rank: CapturedRank) -> None:
        """Record the memory of the graphs."""
        super().captured(rank)
        gc.collect()  # dead objects must not count as kept
        backend = self._around.backend
        own: dict[Pool, AddressRanges] = {}
        for slot in (s for slots in rank.slots for s in slots):
            for tensor in (*slot.outputs.tensors, *slot.input_grads.tensors):
                if tensor is not None:
                    own[slot.block.pool] = own.get(slot.block.pool, AddressRanges()) | backend.raw(
                        tensor
                    )
        kept = {pool: pool.live() - ranges for pool, ranges in own.items()}
        self._poison = Poison(rank.pools.scratch, backend.device, kept)

    def _forget(self) -> None:
        super()._forget()
        self._kept_nan: dict[Slot, Place | None] = {}
        self._were_infinite: list[bool] = []
        self._begin: dict[Slot, ChunkState] = {}

    def before(self, action: Action, slot: Slot, tensors: Sequence[torch.Tensor | None]) -> None:
        """Fill dead memory; copy the state that an eager pass begins with, and look for NaN."""
        if action == "F":
            self._count_forward(slot)
            written = (*self._chunks[slot.chunk].buffers, *self._written(slot.chunk))
            self._begin[slot] = self._around.state_of(written)
        self._poison.before_replay()
        if action == "F":
            return
        # A NaN of the model itself stays in a gradient, infinities may add up to one, and memory
        # without a gradient yet may hold anything. Other microbatches change gradients between
        # both halves.
        self._were_infinite = self._gradients_with(slot, _is_infinite)
        if action == "W":
            return
        self._kept_nan[slot] = self._place(slot)  # while its saved tensors exist
        if has_nan(tensors):
            where = "it came in with the output gradient, from work after the chunk"
            self._warn_of_nan(slot, "backward", where)

    def after(self, action: Action, slot: Slot) -> None:
        """Look for NaN in the results, and fill a slot whose backward has ended."""
        if action == "F":
            self._look_at_outputs(slot)
        elif action != "I":
            self._look_at_gradients(slot)
        elif has_nan(slot.input_grads.tensors):
            self._explain(slot, [False] * len(self._names[slot.chunk]))

    def _look_at_outputs(self, slot: Slot) -> None:
        if not has_nan(slot.outputs.tensors):
            return
        with_grad = self._with_grad(slot)
        origin = self._first_layer_with_nan(slot, slot.inputs.tensors, with_grad, self._begin[slot])
        if origin:
            self._warn_of_nan(slot, "forward", origin)
            return
        layer = self._place(slot) or "after all tensors that are kept for the backward"
        replayed = self._replayed(slot, "forward")
        self._around.host.judge(stale_memory(replayed, "an output has a NaN", str(layer)))

    def _look_at_gradients(self, slot: Slot) -> None:
        have_nan = self._gradients_with(slot, torch.isnan)
        pairs = zip(have_nan, self._were_infinite, strict=True)
        is_new = [has and not was_infinite for has, was_infinite in pairs]
        if has_nan(slot.input_grads.tensors) or any(is_new):
            self._explain(slot, is_new)
        raw, pool = self._around.backend.raw, slot.block.pool
        holds_grads = any(
            g is not None and raw(g) & pool.reserved() for g in slot.input_grads.tensors
        )
        self._poison.after_backward(pool, holds_grads=holds_grads)

    def _gradients_with(
        self, slot: Slot, property_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[bool]:
        """Return whether each parameter's gradient has such a value. Waits for the device once."""
        flags = [property_of(g.detach()).any() for g in self._gradients[slot.chunk]]
        return torch.stack(flags).tolist() if flags else []

    def _explain(self, slot: Slot, is_new: Sequence[bool]) -> None:
        passes = self._passes_of(slot)
        assert slot.output_grads is not None
        begin = self._begin[slot]
        forward = passes.forward(slot.inputs.tensors, self._with_grad(slot), begin=begin)
        eager = passes.backward(
            forward, slot.output_grads.receiving, slot.output_grads.tensors, accumulates=False
        )
        if has_nan([*eager.input_grads, *eager.sums]):
            name = self._first_nan_gradient(slot.chunk, eager.sums, eager.order)
            where = f"the first gradient with a NaN is that of {name or 'an input'}"
            self._warn_of_nan(slot, "backward", where)
            return
        first = next((i for i in eager.order if is_new[i]), None)
        name = "" if first is None else self._names[slot.chunk][first]
        what = f"the gradient of {name or 'an input'} has a NaN"
        place = self._kept_nan.get(slot)
        layer = str(place) if place is not None else name.rpartition(".")[0] or "unknown"
        self._around.host.judge(stale_memory(self._replayed(slot, "backward"), what, layer))

    def _with_grad(self, slot: Slot) -> list[bool]:
        return [grad is not None for grad in slot.input_grads.tensors]

    def _place(self, slot: Slot) -> Place | None:
        records = self._records.of(slot, self._chunks[slot.chunk])
        return first_nan(records, memory_of(slot, self._around.backend))


def _is_infinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return where values are infinite or NaN."""
    return ~tensor.isfinite()

"""Poison mode: fill dead memory with NaN, and explain a NaN that a replay returns.

Scratch is dead before every replay. A slot's pool is dead from the end of its backward to its next
forward. With a correct plan, poison changes no result; with a wrong one, the loss becomes NaN.

Only then does an eager pass run, to distinguish a replay that read dead memory from a model that
produces a NaN by itself.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from chunkgraph.engine.bits import has_nan
from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.capture.restore import ChunkState
from chunkgraph.engine.capture.saved import first_nan
from chunkgraph.engine.chunk import ReplayAction
from chunkgraph.engine.observer import Tensors
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.eager_pass import EagerPass
from chunkgraph.graphs import AddressRanges, Pool

_STALE = (
    "has a NaN where an eager one on the same inputs has none: it read memory that was no longer "
    "its own"
)


class PoisonVerifier(Verifier):
    """Fill dead memory around replays, and look for NaN in their results."""

    _has_warned = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        gc.collect()  # dead objects must not count as lasting
        own: dict[Pool, AddressRanges] = {}
        for slot in (s for slots in self._graphs.slots for s in slots):
            for tensor in (*slot.outputs.tensors, *slot.input_grads.tensors):
                if tensor is not None:
                    pool = slot.memory.pool
                    ranges = self._backend.storage_ranges(tensor)
                    own[pool] = own.get(pool, AddressRanges()) | ranges
        # What lasts as long as the graphs, such as a mask that a module created in the capture.
        self._lasting = {pool: pool.live() - results for pool, results in own.items()}
        self._scratch = self._graphs.pools.scratch
        self._dead: list[Pool] = []  # pools of free slots, which hold input gradients until now

    def _forget(self) -> None:
        super()._forget()
        self._saved_nan: dict[int, str] = {}
        self._were_infinite: list[bool] = []
        self._begin: dict[int, ChunkState] = {}

    def before(self, action: ReplayAction, slot: Slot, tensors: Tensors) -> None:
        """Fill dead memory; copy the state that an eager pass begins with, and look for NaN."""
        super().before(action, slot, tensors)
        if action == "F":
            self._begin[slot.turn] = self._passes_of(slot).state()
        if self._scratch is not None:
            self._fill(self._scratch)
        while self._dead:
            self._fill(self._dead.pop())
        if action == "F":
            return
        # A NaN of the model itself stays in a gradient, infinities may add up to one, and memory
        # without a gradient yet may hold anything. Other microbatches change gradients between
        # both halves.
        self._were_infinite = self._gradients_with(slot, lambda g: ~g.isfinite())
        if action == "W":
            return
        # Until the backward overwrites what the forward keeps.
        self._saved_nan[slot.turn] = first_nan(self._saved_by(slot))
        if has_nan(tensors):
            where = "it came in with the output gradient, from work after the chunk"
            self._warn(slot, "backward", where)

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Look for NaN in the results, and fill a slot whose backward has ended."""
        if action == "F":
            self._look_at_outputs(slot)
        elif action != "I":
            self._look_at_gradients(slot)
        elif has_nan(slot.input_grads.tensors):
            self._explain(slot, [False] * len(self._gradients[slot.chunk]))

    def _look_at_outputs(self, slot: Slot) -> None:
        if not has_nan(slot.outputs.tensors):
            return
        if has_nan(slot.inputs.tensors):
            self._warn(slot, "forward", "it came in with the input")
            return
        eager = self._forward(slot)
        if has_nan(eager.call.tensors):
            layer = first_nan(eager.saved) or "the last one"
            self._warn(slot, "forward", f"the first layer with a NaN is {layer}")
            return
        layer = first_nan(self._saved_by(slot)) or "after all tensors that the backward reads"
        self._judge(slot, "forward", _STALE, "an output has a NaN", f"with a NaN: {layer}")

    def _look_at_gradients(self, slot: Slot) -> None:
        have_nan = self._gradients_with(slot, torch.isnan)
        pairs = zip(have_nan, self._were_infinite, strict=True)
        is_new = [has and not was_infinite for has, was_infinite in pairs]
        if has_nan(slot.input_grads.tensors) or any(is_new):
            self._explain(slot, is_new)
        pool, raw = slot.memory.pool, self._backend.storage_ranges
        reserved = pool.reserved()
        # A compiled backward may write an input gradient over a saved tensor. It lives until the
        # next replay, which then fills the pool. (With pages it was copied, or lies elsewhere.)
        is_paged = slot.chunk in self._graphs.paged
        grads = [] if is_paged else slot.input_grads.tensors
        if any(raw(g) & reserved for g in grads if g is not None):
            self._dead.append(pool)
        else:
            self._fill(pool)

    def _fill(self, pool: Pool) -> None:
        pool.poison(self._lasting.get(pool, ()))

    def _gradients_with(
        self, slot: Slot, property_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[bool]:
        """Return whether each parameter's gradient has such a value. Waits for the device once."""
        flags = [property_of(g.detach()).any() for g in self._gradients[slot.chunk]]
        return torch.stack(flags).tolist() if flags else []

    def _explain(self, slot: Slot, is_new: Sequence[bool]) -> None:
        """Run the microbatch eagerly, and tell a NaN of the model from one of dead memory."""
        eager = self._forward(slot)
        assert slot.output_grads is not None
        grads = slot.output_grads.tensors
        sums, order = self._passes_of(slot).backward(eager, grads, accumulates=False)
        has_own = has_nan([*eager.call.input_grads(), *sums])
        named = [i for i in order if (has_nan([sums[i]]) if has_own else is_new[i])]
        name = parameter_names(self._chunks[slot.chunk])[named[0]] if named else ""
        if has_own:
            where = f"the first gradient with a NaN is that of {name or 'an input'}"
            self._warn(slot, "backward", where)
            return
        what = f"the gradient of {name or 'an input'} has a NaN"
        layer = self._saved_nan.get(slot.turn) or name.rpartition(".")[0] or "unknown"
        self._judge(slot, "backward", _STALE, what, f"with a NaN: {layer}")

    def _forward(self, slot: Slot) -> EagerPass:
        with_grad = [grad is not None for grad in slot.input_grads.tensors]
        return self._passes_of(slot).forward(slot.inputs.tensors, with_grad, self._begin[slot.turn])

    def _warn(self, slot: Slot, direction: str, where: str) -> None:
        """Warn of a NaN that eager training has too, once; later wrong replays still raise."""
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._describe(slot, direction)} has a NaN, as eager training would have: "
                f"{where}. Later NaNs give no warning.",
                stacklevel=2,
            )

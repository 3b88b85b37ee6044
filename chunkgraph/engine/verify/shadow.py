"""Shadow mode: compare every replay with an eager pass on the same inputs.

Both must have the same bits, except for tensors in which two eager passes differed at the capture:
these may differ by about as much (`Noise`).

The eager forward runs before the replay, and its autograd graph is kept until the backward, so
that its saved tensors show where a replay went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkgraph.engine.capture.restore import ChunkState
from chunkgraph.engine.capture.saved import first_difference, what_follows
from chunkgraph.engine.capture.self_test import Measured, backward_difference, forward_difference
from chunkgraph.engine.chunk import ReplayAction
from chunkgraph.engine.layout import copy_into, duplicate
from chunkgraph.engine.observer import Tensors
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.eager_pass import EagerPass

_DIFFERS = "differs from an eager one on the same inputs and random state"


class ShadowVerifier(Verifier):
    """Compare outputs, input gradients, parameter gradients, buffers and random state."""

    def _forget(self) -> None:
        super()._forget()
        self._passing: dict[int, EagerPass] = {}
        self._ended: dict[int, Measured] = {}
        self._overwritten: dict[int, str] = {}
        # Between the halves of split backwards: output gradients and state from before the first,
        # and the input gradients that it left.
        self._halved: dict[int, tuple[list[torch.Tensor], ChunkState]] = {}
        self._input_grads: dict[int, Sequence[torch.Tensor | None]] = {}

    def before(self, action: ReplayAction, slot: Slot, tensors: Tensors) -> None:
        """Run the eager pass. Of a split backward, it runs before the weight half.

        It then recomputes with the state from before the input half, and adds to the gradients so
        far.
        """
        super().before(action, slot, tensors)
        if action == "F":
            inputs = [t for t in tensors if t is not None]
            pairs = zip(slot.input_grads.tensors, inputs, strict=True)
            with_grad = [grad is not None or t.requires_grad for grad, t in pairs]
            self._passing[slot.turn] = self._passes_of(slot).forward(inputs, with_grad)
        elif action == "W":
            self._run_backward(slot, *self._halved.pop(slot.turn))
        else:
            grads = _output_grads(slot, tensors)
            saved = self._saved_by(slot)  # until the backward overwrites it
            self._overwritten[slot.turn] = first_difference(saved, self._passing[slot.turn].saved)
            if action == "I":
                self._halved[slot.turn] = grads, self._passes_of(slot).state()
            else:
                self._run_backward(slot, grads)

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Compare the replay with the eager pass; both halves of a backward after the second."""
        if action == "F":
            self._compare_forward(slot)
        elif action == "I":
            grads = slot.input_grads.tensors
            self._input_grads[slot.turn] = [None if g is None else g.clone() for g in grads]
        else:
            self._compare_backward(slot, self._input_grads.pop(slot.turn, slot.input_grads.tensors))

    def _run_backward(
        self, slot: Slot, grads: Sequence[torch.Tensor], begin: ChunkState | None = None
    ) -> None:
        eager = self._passing.pop(slot.turn)
        sums, order = self._passes_of(slot).backward(eager, grads, begin=begin)
        self._ended[slot.turn] = eager.measured.with_backward(eager.call.input_grads(), sums, order)

    def _compare_forward(self, slot: Slot) -> None:
        buffers, generators = self._chunks[slot.chunk].buffers, self._passes_of(slot).generators()
        replay = Measured.of(slot.outputs.leaves, buffers, generators)
        noise = self._graphs.warm_ups[slot.bank, slot.chunk].noise
        eager = self._passing[slot.turn]
        what = forward_difference([eager.measured], [replay], noise)
        if slot.output_grads is None:
            del self._passing[slot.turn]
        if what:
            saved = self._saved_by(slot)
            layer = first_difference(saved, eager.saved) or what_follows(saved)
            self._judge(slot, "forward", _DIFFERS, what, f"that differs: {layer}")

    def _compare_backward(self, slot: Slot, input_grads: Sequence[torch.Tensor | None]) -> None:
        eager, place = self._ended.pop(slot.turn), self._overwritten.pop(slot.turn)
        replay = eager.with_backward(input_grads, self._gradients[slot.chunk])
        noise = self._graphs.warm_ups[slot.bank, slot.chunk].noise
        what, layer = backward_difference(self._chunks[slot.chunk], [eager], [replay], noise)
        if not what:
            return
        if place:
            layer = f"{place}; it was correct after the forward and was overwritten later"
        self._judge(slot, "backward", _DIFFERS, what, f"that differs: {layer}")


def _output_grads(slot: Slot, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return copies of the output gradients that the backward receives, in the slot's layouts.

    The copy of a missing gradient, which the replay refuses next, keeps stale values.
    """
    copies: list[torch.Tensor] = []
    own = slot.output_grads
    assert own is not None
    for static, position in zip(own.tensors, own.receiving, strict=True):
        grad = grads[position]
        copy = duplicate(static)(static)
        if grad is not None:
            copy_into(copy)(grad.detach())
        copies.append(copy)
    return copies

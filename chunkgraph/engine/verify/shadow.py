"""Shadow mode: compare every replay with an eager pass on the same inputs.

Both must have the same bits, except for tensors in which two eager passes differed at the capture:
these may differ by about as much (`Noise`).

The eager forward runs before the replay, and its autograd graph is kept until the backward, so
that its saved tensors show where a replay went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkgraph.engine.bits import describe_difference, has_nan, same_bits
from chunkgraph.engine.capture.saved import Place, first_difference
from chunkgraph.engine.observer import Action
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.base import Verifier, copy_output_grads, inputs_with_grad
from chunkgraph.engine.verify.eager_pass import EagerBackward, EagerForward
from chunkgraph.engine.verify.records import memory_of
from chunkgraph.engine.verify.report import difference
from chunkgraph.engine.verify.state import ChunkState

__all__ = ["ShadowVerifier"]


class ShadowVerifier(Verifier):
    """Compare outputs, input gradients, parameter gradients, buffers and random state."""

    def _forget(self) -> None:
        super()._forget()
        self._forwards: dict[Slot, EagerForward] = {}
        self._backwards: dict[Slot, EagerBackward] = {}
        self._overwritten: dict[Slot, Place | None] = {}
        # Between the halves of split backwards: output gradients and state from before the first,
        # and the input gradients that it left.
        self._halved: dict[Slot, tuple[list[torch.Tensor], ChunkState]] = {}
        self._input_grads: dict[Slot, tuple[torch.Tensor | None, ...]] = {}

    def before(self, action: Action, slot: Slot, tensors: Sequence[torch.Tensor | None]) -> None:
        """Run the eager pass. Of a split backward, it runs before the weight half.

        It then recomputes with the state from before the input half, and adds to the gradients so
        far.
        """
        if action == "F":
            self._before_forward(slot, [t for t in tensors if t is not None])
        elif action == "W":
            self._run_backward(slot, self._forwards[slot], *self._halved.pop(slot))
        else:
            self._before_backward(action, slot, tensors)

    def after(self, action: Action, slot: Slot) -> None:
        """Compare the replay with the eager pass; both halves of a backward after the second."""
        if action == "F":
            self._after_forward(slot)
            if slot.output_grads is None:
                del self._forwards[slot]
        elif action == "I":
            grads = [None if g is None else g.clone() for g in slot.input_grads.tensors]
            self._input_grads[slot] = tuple(grads)
        else:
            self._compare(
                slot, slot.input_grads.tensors if action == "B" else self._input_grads.pop(slot)
            )

    def _before_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        self._count_forward(slot)
        with_grad = inputs_with_grad(slot, tensors)
        forward = self._passes_of(slot).forward(tensors, with_grad)
        self._forwards[slot] = forward
        if not self._has_warned_of_nan and has_nan(forward.tensors):
            layer = self._first_layer_with_nan(slot, tensors, with_grad)
            self._warn_of_nan(slot, "forward", layer)

    def _after_forward(self, slot: Slot) -> None:
        eager = self._forwards[slot]
        what = self._forward_difference(slot, eager)
        if not what:
            return
        place = self._place(slot, eager)
        layer = str(place) if place is not None else self._after_all(slot)
        self._around.host.judge(difference(self._replayed(slot, "forward"), what, layer))

    def _before_backward(
        self, action: Action, slot: Slot, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run the eager backward, and compare the slot's saved tensors while they exist."""
        eager = self._forwards[slot]
        copies = copy_output_grads(slot, grads)
        self._overwritten[slot] = self._place(slot, eager)
        if action == "I":
            self._halved[slot] = copies, self._passes_of(slot).state()
        else:
            self._run_backward(slot, eager, copies)

    def _run_backward(
        self,
        slot: Slot,
        eager: EagerForward,
        grads: Sequence[torch.Tensor],
        begin: ChunkState | None = None,
    ) -> None:
        backward = self._passes_of(slot).backward(eager, _receiving(slot), grads, begin=begin)
        self._backwards[slot] = backward
        if self._has_warned_of_nan:
            return
        if has_nan(grads):
            where = "it came in with the output gradient, from work after the chunk"
            self._warn_of_nan(slot, "backward", where)
        elif has_nan([*backward.input_grads, *backward.sums]):
            name = self._first_nan_gradient(slot.chunk, backward.sums, backward.order)
            where = f"the first gradient with a NaN is that of {name or 'an input'}"
            self._warn_of_nan(slot, "backward", where)

    def _compare(self, slot: Slot, input_grads: Sequence[torch.Tensor | None]) -> None:
        del self._forwards[slot]
        eager, place = self._backwards.pop(slot), self._overwritten.pop(slot)
        what, layer = self._backward_difference(slot, eager, input_grads)
        if not what:
            return
        if place is not None:
            layer = f"{place}; it was correct after the forward and was overwritten later"
        self._around.host.judge(difference(self._replayed(slot, "backward"), what, layer))

    def _forward_difference(self, slot: Slot, eager: EagerForward) -> str:
        num_leaves, num_eager = len(slot.outputs.leaves), len(eager.leaves)
        if num_eager != num_leaves:
            return f"the result has {num_leaves} leaves, the eager one {num_eager}"
        noise, positions = self._noise[slot.bank, slot.chunk], self._positions(slot)
        for i, (mine, theirs) in enumerate(zip(slot.outputs.leaves, eager.leaves, strict=True)):
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
                limit = noise.of_forward(positions[id(mine)])
                if not same_bits(mine, theirs) and not _is_within(limit, mine, theirs):
                    return f"output {i}: {describe_difference(mine, theirs)}"
            elif type(mine) is not type(theirs) or (
                isinstance(mine, (bool, int, float, str)) and mine != theirs
            ):
                return f"output {i}: {mine!r} captured, {theirs!r} eager"
        buffers = self._chunks[slot.chunk].buffers
        return self._around.state_of(buffers).difference(
            eager.after, lambda i, *ab: _is_within(noise.of_forward(len(positions) + i), *ab)
        )

    def _backward_difference(
        self, slot: Slot, eager: EagerBackward, input_grads: Sequence[torch.Tensor | None]
    ) -> tuple[str, str]:
        """Return the difference and the name of its layer; two empty strings if there is none."""
        names = self._names[slot.chunk]
        buffers, noise = self._gradients[slot.chunk], self._noise[slot.bank, slot.chunk]
        wrong = [
            i
            for i, (mine, theirs) in enumerate(zip(buffers, eager.sums, strict=True))
            if not same_bits(mine, theirs)
            and not _is_within(noise.of_backward(len(slot.inputs.tensors) + i), mine, theirs)
        ]
        if wrong:
            rank = {index: place for place, index in enumerate(eager.order)}
            first = min(wrong, key=lambda i: rank.get(i, -1))
            what = (
                f"the gradient of {names[first]} (the first in the order of the backward; "
                f"{len(wrong)} of {len(names)} differ): "
                f"{describe_difference(buffers[first], eager.sums[first])}"
            )
            return what, names[first].rpartition(".")[0] or names[first]
        for i, (mine, theirs) in enumerate(zip(input_grads, eager.input_grads, strict=True)):
            if (mine is None) != (theirs is None):
                which = "captured, but not in the eager pass" if theirs is None else "eager only"
                return f"there is a gradient of tensor argument {i}: {which}", "the chunk's input"
            if mine is None or theirs is None or same_bits(mine, theirs):
                continue
            if not _is_within(noise.of_backward(i), mine, theirs):
                what = f"the gradient of tensor argument {i}: {describe_difference(mine, theirs)}"
                return what, "the chunk's input (no parameter's gradient differs)"
        return "", ""

    def _positions(self, slot: Slot) -> dict[int, int]:
        """Return the position of each output among the tensors of the result, by id."""
        return {id(t): i for i, t in enumerate(slot.outputs.tensors)}

    def _place(self, slot: Slot, eager: EagerForward) -> Place | None:
        records = self._records.of(slot, self._chunks[slot.chunk])
        return first_difference(records, eager.saved, memory_of(slot, self._around.backend))

    def _after_all(self, slot: Slot) -> str:
        records = self._records.of(slot, self._chunks[slot.chunk])
        if not records:
            return "unknown (the slot keeps nothing that can be compared)"
        return (
            f"{records[-1].layer or 'the chunk'}, or what follows it in the chunk (all tensors "
            "kept for the backward are correct)"
        )


def _receiving(slot: Slot) -> tuple[int, ...]:
    assert slot.output_grads is not None
    return slot.output_grads.receiving


def _is_within(limit: float, replayed: torch.Tensor, eager: torch.Tensor) -> bool:
    """Return whether two tensors differ by at most ``limit`` of the eager one's norm."""
    if not limit or not eager.is_floating_point():
        return bool(limit)
    dtype = torch.promote_types(eager.dtype, torch.float32)
    a, b = replayed.detach().to(dtype), eager.detach().to(dtype)
    return bool(torch.linalg.vector_norm(a - b) <= limit * torch.linalg.vector_norm(b))

"""What every verify mode is to the engine, and what they share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.signature import Call
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.verify.bits import has_nan, tensors_in
from chunkgraph.engine.verify.eager_pass import EagerPasses, Surroundings
from chunkgraph.engine.verify.records import SavedRecords
from chunkgraph.engine.verify.report import Replayed, warn_of_nan

__all__ = ["Verifier"]


class Verifier:
    """Checks the replays of one rank in the steps that are to be verified.

    The engine captures `chunks`, tells of the capture by `captured`, and in a verified step calls
    the other methods around every replay, on the stream of the replays.

    Args:
        chunks: of the rank.
        samples: the calls that are captured, by bank.
        surroundings: what eager passes run in.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        samples: Mapping[Hashable, Sequence[Call]],
        surroundings: Surroundings,
    ) -> None:
        self._chunks = tuple(chunks)
        self._calls = {
            key: tuple(sample.emptied() for sample in calls) for key, calls in samples.items()
        }
        self._around = surroundings
        self._records = SavedRecords()
        self._names = tuple(parameter_names(chunk) for chunk in chunks)
        self.chunks = tuple(self._records.noting(chunk) for chunk in chunks)
        self._gradients: tuple[tuple[torch.Tensor, ...], ...] = ()
        self._step = 0
        self._has_told_nan = False
        self._forget()

    def begin_bank(self, bank: Hashable) -> None:
        """The session goes on with a bank; None: with what is of none or of all."""
        self._records.bank = bank

    def captured(self, rank: CapturedRank) -> None:
        """The session has succeeded."""
        self._gradients = tuple(sinks.buffers for sinks in rank.sinks)

    def begin_step(self, step: int) -> None:
        """A verified step begins: replayed step ``step`` after the capture."""
        self._step = step

    def end_step(self) -> None:
        """It has ended, in whatever way: drop what belongs to it."""
        self._forget()

    def before_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """``slot`` is about to get ``tensors`` and be replayed."""

    def after_forward(self, slot: Slot) -> None:
        """Its forward has been replayed.

        Raises:
            VerifyError: the replay is not what it must be.
        """

    def before_backward(self, slot: Slot, grads: Sequence[torch.Tensor | None]) -> None:
        """``slot`` is about to get output gradients and be replayed."""

    def after_backward(self, slot: Slot) -> None:
        """Its backward, or the input half of it, has been replayed; no caller has seen it yet.

        Raises:
            VerifyError: the replay is not what it must be.
        """

    def before_weight(self, slot: Slot) -> None:
        """The weight half of its split backward is about to be replayed."""

    def after_weight(self, slot: Slot) -> None:
        """The weight half has been replayed; no caller has seen its results yet.

        Raises:
            VerifyError: the replay is not what it must be.
        """

    def _count(self, slot: Slot) -> None:
        """A forward begins; to be called once for each."""
        self._microbatches[slot] = self._num_forwards[slot.chunk]
        self._num_forwards[slot.chunk] += 1

    def _forget(self) -> None:
        self._num_forwards = [0] * len(self._chunks)
        self._microbatches: dict[Slot, int] = {}
        self._passes: dict[tuple[int, Hashable], EagerPasses] = {}

    def _passes_of(self, slot: Slot) -> EagerPasses:
        c, key = slot.chunk, slot.bank
        if (c, key) not in self._passes:
            self._passes[c, key] = EagerPasses(
                self._chunks[c],
                self._calls[key][c],
                self._gradients[c],
                self._around,
                self._records.written(self._chunks[c]),
            )
        return self._passes[c, key]

    def _replayed(self, slot: Slot, direction: str) -> Replayed:
        return Replayed(slot, direction, self._microbatches[slot], self._step)

    def _tell_nan(self, slot: Slot, direction: str, where: str) -> None:
        """Once; a replay that goes wrong later is found all the same."""
        if not self._has_told_nan:
            self._has_told_nan = True
            warn_of_nan(self._replayed(slot, direction), where)

    def _first_layer_with_nan(
        self, slot: Slot, tensors: Sequence[torch.Tensor], wants_grad: Sequence[bool]
    ) -> str:
        """By an eager forward from the present state: where a NaN comes from, or "" if none."""
        if has_nan(tensors):
            return "it came in with the input"
        found: list[str] = []

        def look(layer: str, result: object) -> None:
            if not found and has_nan(tensors_in(result)):
                found.append(layer)

        forward = self._passes_of(slot).forward(tensors, wants_grad, look)
        if not has_nan(forward.tensors):
            return ""
        return f"the first layer with a NaN is {found[0]}" if found else "it arose in the chunk"

    def _first_nan_gradient(
        self, c: int, gradients: Sequence[torch.Tensor], order: Sequence[int]
    ) -> str:
        """The first parameter, in the order of the backward, whose gradient has a NaN, or ""."""
        for index in order:
            if has_nan([gradients[index]]):
                return self._names[c][index]
        return ""


def wants_grad(slot: Slot, tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which inputs of a replay take a gradient."""
    return [
        grad is not None or tensor.requires_grad
        for grad, tensor in zip(slot.input_grads, tensors, strict=True)
    ]


def filled(slot: Slot, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Copies of the gradients of the slot's differentiable outputs; a missing one is zero."""
    copies: list[torch.Tensor] = []
    for static, position in zip(slot.output_grads, slot.receiving, strict=True):
        given = grads[position]
        copies.append(torch.zeros_like(static) if given is None else given.detach().clone())
    return copies

"""The interface of verify modes to the engine, and their common parts."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from chunkgraph.engine import observer
from chunkgraph.engine.bits import has_nan, tensors_in
from chunkgraph.engine.capture.captured_rank import CapturedRank
from chunkgraph.engine.capture.layers import parameter_names
from chunkgraph.engine.capture.self_test import Noise
from chunkgraph.engine.chunk import CaptureOptions, Chunk
from chunkgraph.engine.layout import copy_into, duplicate
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import Call
from chunkgraph.engine.verify.eager_pass import EagerPasses, Surroundings
from chunkgraph.engine.verify.records import SavedRecords
from chunkgraph.engine.verify.report import Replayed, warn_of_nan
from chunkgraph.engine.verify.state import ChunkState

__all__ = ["Verifier"]


class Verifier(observer.Verifier):
    """Check the replays of one rank in verified steps.

    The engine captures `chunks` and reports the capture by `captured`. In a verified step a
    verifier observes every replay, on the stream of the replays. For a wrong one, it raises what
    `Host.judge` raises, a VerifyError.

    Args:
        chunks: the chunks of the rank.
        samples: the captured calls, by bank.
        surroundings: the context of eager passes.
        options: the steps to verify.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        samples: Mapping[Hashable, Sequence[Call]],
        surroundings: Surroundings,
        options: CaptureOptions,
    ) -> None:
        self._chunks, self._options = tuple(chunks), options
        self._calls = {
            key: tuple(sample.emptied() for sample in calls) for key, calls in samples.items()
        }
        self._around = surroundings
        self._records = SavedRecords()
        self._names = tuple(parameter_names(chunk) for chunk in chunks)
        self.chunks = tuple(self._records.recording(chunk) for chunk in chunks)
        self._gradients: tuple[tuple[torch.Tensor, ...], ...] = ()
        self._noise: Mapping[tuple[Hashable, int], Noise] = {}
        self._step = 0
        self._has_warned_of_nan = False
        self._forget()

    def begin_bank(self, bank: Hashable) -> None:
        """Note the bank of the next captures; None: no single bank."""
        self._records.bank = bank

    def captured(self, rank: CapturedRank) -> None:
        """Take the result of a successful session."""
        self._gradients = tuple(sinks.buffers for sinks in rank.sinks)
        self._noise = rank.noise

    def observes(self, step: int | None) -> bool:
        """Observe the steps that the options ask for."""
        return step is not None and self._options.verifies(step)

    def begin_step(self, step: int | None) -> None:
        """Begin a verified step, replayed step ``step`` after the capture."""
        self._step = step or 0

    def end_step(self, *, has_failed: bool) -> None:  # noqa: ARG002
        """Drop the data of the step, after success or failure."""
        self._forget()

    def _count_forward(self, slot: Slot) -> None:
        """Number the microbatch of a forward; called once per forward."""
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
                self._written(c),
            )
        return self._passes[c, key]

    def _written(self, c: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors, other than buffers, that a chunk's forward updates in place."""
        return self._records.written(self._chunks[c])

    def _replayed(self, slot: Slot, direction: str) -> Replayed:
        return Replayed(slot, direction, self._microbatches[slot], self._step)

    def _warn_of_nan(self, slot: Slot, direction: str, where: str) -> None:
        """Warn of a NaN that eager training has too, once; later wrong replays still raise."""
        if not self._has_warned_of_nan:
            self._has_warned_of_nan = True
            warn_of_nan(self._replayed(slot, direction), where)

    def _first_layer_with_nan(
        self,
        slot: Slot,
        tensors: Sequence[torch.Tensor],
        with_grad: Sequence[bool],
        begin: ChunkState | None = None,
    ) -> str:
        """Run an eager forward; return the origin of a NaN, or "".

        Args:
            slot: the slot of the replay.
            tensors: the inputs.
            with_grad: whether each input takes a gradient.
            begin: the state before the replay; None for the present one.
        """
        if has_nan(tensors):
            return "it came in with the input"
        layers: list[str] = []

        def look(layer: str, result: object) -> None:
            if not layers and has_nan(tensors_in(result)):
                layers.append(layer)

        forward = self._passes_of(slot).forward(tensors, with_grad, look, begin)
        if not has_nan(forward.tensors):
            return ""
        return f"the first layer with a NaN is {layers[0]}" if layers else "it arose in the chunk"

    def _first_nan_gradient(
        self, c: int, gradients: Sequence[torch.Tensor], order: Sequence[int]
    ) -> str:
        """Return the first parameter in backward order whose gradient has a NaN, or ""."""
        for index in order:
            if has_nan([gradients[index]]):
                return self._names[c][index]
        return ""


def inputs_with_grad(slot: Slot, tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return which inputs of a replay take a gradient."""
    return [
        grad is not None or tensor.requires_grad
        for grad, tensor in zip(slot.input_grads.tensors, tensors, strict=True)
    ]


def copy_output_grads(slot: Slot, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return copies of the output gradients that the backward receives, in the slot's layouts.

    Where one is missing, which the replay refuses next, the copy has the last one's values.
    """
    copies: list[torch.Tensor] = []
    assert slot.output_grads is not None
    own = slot.output_grads
    for static, position in zip(own.tensors, own.receiving, strict=True):
        grad = grads[position]
        copy = duplicate(static)(static)
        if grad is not None:
            copy_into(copy)(grad.detach())
        copies.append(copy)
    return copies

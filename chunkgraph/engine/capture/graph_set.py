"""`GraphSet`: the graphs that one capture session has made on a rank."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from chunkgraph.engine.capture.saved import SavedTensor
from chunkgraph.engine.capture.warm_up import WarmUp
from chunkgraph.engine.checks import ModelGuard
from chunkgraph.engine.chunk import GradientMarker
from chunkgraph.engine.gradients import GradientSinks
from chunkgraph.engine.slot import Slot
from chunkgraph.engine.tree import Call, Signature
from chunkgraph.memory import PoolPlan

SlotKey = tuple[Hashable, int, int]
"""Key of the bank, index of the chunk, number of the slot."""


@dataclass(frozen=True)
class CaptureReport:
    """The result of a session in numbers.

    Attributes:
        num_slots: slots of each chunk.
        shared_slots: whether the chunks share these slots.
        num_graphs: number of graphs of forwards, backwards and halves of backwards.
        slot_bytes: bytes reserved by the slots' own pools.
        held_bytes: bytes of these in use between a forward and the end of its backward, summed over
            slots, each in its largest bank.
        scratch_bytes: bytes reserved by the pool that all backwards share.
        static_bytes: bytes of inputs and gradients outside the pools.
        duration_ms: wall time of the session on this rank.
        memsets_kept: see `GraphBackend`.
    """

    num_slots: tuple[int, ...]
    shared_slots: bool
    num_graphs: int
    slot_bytes: int
    held_bytes: int
    scratch_bytes: int
    static_bytes: int
    duration_ms: float
    memsets_kept: str = ""


@dataclass(frozen=True)
class Bank:
    """The slots captured for one key.

    Attributes:
        slots: by chunk; slot ``k`` here and slot ``k`` of another bank are variants of one slot.
        signatures: the signature with which each chunk was captured.
        calls: the captured call of each chunk, without tensors.
    """

    slots: tuple[tuple[Slot, ...], ...]
    signatures: tuple[Signature, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class GraphSet:
    """All graphs of a session, with the state that replays need.

    Attributes:
        banks: the banks by key, largest first.
        sinks: the gradient memory of each chunk.
        models: the state of each chunk's module that the graphs depend on.
        pools: the memory of all graphs.
        report: the session in numbers.
        markers: what follows the gradients of each slot.
        warm_ups: measurements of the eager passes, by bank and chunk, without the passes.
        saved: the tensors that each slot's forward keeps for its backward.
        paged: the chunks with fewer slots than microbatches in flight.
        held: what `Host.capturing` has yielded.
    """

    banks: dict[Hashable, Bank]
    sinks: tuple[GradientSinks, ...]
    models: tuple[ModelGuard, ...]
    pools: PoolPlan
    report: CaptureReport
    markers: Mapping[Slot, GradientMarker]
    warm_ups: Mapping[tuple[Hashable, int], WarmUp]
    saved: Mapping[SlotKey, tuple[SavedTensor, ...]]
    held: object
    paged: frozenset[int] = frozenset()
    _kept: list[torch.Tensor | None] = field(default_factory=list)

    @property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """Return the slots of each chunk: those of the first bank, then of the other banks."""
        by_chunk = zip(*[bank.slots for bank in self.banks.values()], strict=True)
        return tuple(tuple(slot for slots in of_chunk for slot in slots) for of_chunk in by_chunk)

    def latest_calls(self) -> dict[Hashable, list[Call]]:
        """Return calls with the last inputs of first slots; asleep, with zeros or what was kept."""
        pairs = zip(self._first_inputs(), self._kept or self._first_inputs(), strict=True)
        latest = (torch.zeros_like(t) if k is None else k.to(t.device, copy=True) for t, k in pairs)
        return {
            key: [
                call.filled([next(latest).requires_grad_(t.requires_grad) for t in call.tensors])
                for call in bank.calls
            ]
            for key, bank in self.banks.items()
        }

    def inputs_slept(self) -> None:
        """Keep integers of the inputs that `latest_calls` needs, such as offsets, on the host."""
        for tensor in self._first_inputs():
            self._kept.append(None if tensor.is_floating_point() else tensor.to("cpu", copy=True))

    def inputs_woke(self) -> None:
        """Restore what `inputs_slept` has kept, and load every constant input again next time."""
        for tensor, kept in zip(self._first_inputs(), self._kept, strict=False):
            tensor.zero_() if kept is None else tensor.copy_(kept)
        self._kept.clear()
        self.forget_inputs()

    def forget_inputs(self) -> None:
        """Load every constant input again next time."""
        for slot in (slot for slots in self.slots for slot in slots):
            slot.inputs.forget_sources()

    def _first_inputs(self) -> list[torch.Tensor]:
        slots = [slots[0] for bank in self.banks.values() for slots in bank.slots]
        return [tensor for slot in slots for tensor in slot.inputs.tensors]

    def release(self) -> None:
        """Release all graphs and their memory."""
        for slots in self.slots:
            for slot in slots:
                slot.release()
        for sinks in self.sinks:
            sinks.release()

"""What a slot keeps from its forward to its backward, as bytes that another slot can take.

The slots of a chunk are captured one like the other, so what they keep lies at the same offsets of
their pools, and the graphs of one can go on with the bytes of another. Offsets are compared, and
every capture session tests the bytes: a graph may hold an address of its own slot in its data.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import partial

import torch

from chunkgraph.engine.capture.restore import restoring, writable
from chunkgraph.engine.capture.session import Session, capture_slot, differing_replay
from chunkgraph.engine.layout import memory_of
from chunkgraph.engine.slot import Slot
from chunkgraph.graphs import AddressRanges, tensor_at


def page_of(slot: Slot) -> tuple[torch.Tensor, ...]:
    """Return what a captured slot keeps: what its forward wrote in its pool, and static inputs."""
    inputs = (place for t in slot.inputs.tensors if (place := memory_of(t)) is not None)
    device = slot.memory.pool.device
    return tuple(tensor_at(r.start, r.end - r.start, device) for r in (*slot.memory.kept, *inputs))


def layout_problem(slots: Sequence[Slot]) -> str:
    """Return why what one slot keeps cannot be moved into another, by their layouts, or ""."""
    first, pool = slots[0], slots[0].memory.pool
    for i, tensor in enumerate(first.inputs.tensors):
        if type(tensor) is not torch.Tensor or tensor.device != pool.device:
            return f"its input {i} is a {type(tensor).__name__} on {tensor.device}"
    places = (memory_of(t) for t in first.input_grads.tensors if t is not None)
    grads = AddressRanges(place for place in places if place is not None)
    if len(first.graphs) == 2 and grads & pool.reserved():
        return "its backward leaves input gradients where the forward saved something"
    kept = [slot.memory.pool.relative(slot.memory.kept) for slot in slots]
    if None in kept:
        return "its memory is in no arena (a backend that was made without can_sleep)"
    layouts = {tuple((at, r.end - r.start) for at, r in places or ()) for places in kept}
    return "its slots keep memory at different offsets" if len(layouts) > 1 else ""


class PageTrial:
    """The chunks of a capture session with fewer slots than microbatches in flight.

    Args:
        session: The session, whose eager passes have been measured.
        num_slots: Number of slots of each chunk that the limit allows.

    Attributes:
        not_paged: Why chunks are not paged although the limit is lower, by chunk.
    """

    def __init__(self, session: Session, num_slots: tuple[int, ...]) -> None:
        self._session, self._full = session, session.num_slots
        session.num_slots = num_slots
        self.not_paged: dict[int, str] = {}

    @property
    def paged(self) -> frozenset[int]:
        """Return the chunks that are paged, as far as they are tested."""
        pairs = zip(self._session.num_slots, self._full, strict=True)
        return frozenset(c for c, (count, full) in enumerate(pairs) if count < full)

    def test(self, key: Hashable, c: int) -> None:
        """Test that the backward of every slot of a chunk goes on from another slot's forward.

        A chunk for which it does not, on any rank, is not paged.
        """
        session, settings = self._session, self._session.settings
        if c not in self.paged or c in self.not_paged:
            return
        settings.begin_part(key)
        slots = [slot for slot in session.slots if (slot.bank, slot.chunk) == (key, c)]
        reason = layout_problem(slots)
        for slot, other in zip(slots, [*slots[1:], slots[0]], strict=True):
            if settings.any_rank(bool(reason)) or other is slot:
                break
            fill = partial(_fill, slot, [tensor.clone() for tensor in slot.inputs.tensors])
            what, layer = differing_replay(session, slot, partial(self._move, slot, other), fill)
            fill()
            if what:
                reason = f"a backward differs where another slot ran its forward ({what}; {layer})"
        if settings.any_rank(bool(reason)):
            self.not_paged[c] = reason or "another rank cannot page its chunk"
        session.backend.release_cached_memory()

    def _move(self, slot: Slot, other: Slot) -> Slot:
        """Run another forward in another slot, move a slot's page there, and poison its source.

        So a backward differs that reads anything but the page: other inputs and random numbers.
        The other slot, whose static inputs hold the sampled call, is returned.
        """
        session, backend, host = self._session, self._session.backend, self._session.settings.host
        chunk, warm = session.chunks[slot.chunk], session.warm_ups[slot.bank][slot.chunk]
        with (
            backend.preserve_random_state(host.generators()),
            host.preserving(),
            restoring(writable(chunk, warm.written)),
        ):
            for generator in (backend.default_generator, *host.generators()):
                generator.manual_seed(generator.initial_seed() + 1)
            inputs = other.inputs.tensors
            # Activations in reverse, or tokens; other integers, such as offsets, stay in order.
            kind = next((t.dtype for t in inputs if t.is_floating_point()), torch.int64)
            _fill(other, [t.flip([*range(t.dim())]) if t.dtype == kind else t for t in inputs])
            other.graphs["F"].replay()
        for source, target in zip(page_of(slot), page_of(other), strict=True):
            target.copy_(source)
            source.fill_(0xFF)
        return other

    def finish(self) -> None:
        """Capture the other slots of the chunks that cannot be paged."""
        session = self._session
        for c, reason in self.not_paged.items():
            warnings.warn(
                f"{session.chunks[c].label} is not paged, and gets all {self._full[c]} slots: "
                f"{reason}.",
                stacklevel=2,
            )
            counts, first = list(session.num_slots), session.num_slots[c]
            counts[c] = self._full[c]
            session.num_slots = tuple(counts)
            for key in session.samples:
                for s in range(first, counts[c]):
                    capture_slot(session, key, c, s)


def _fill(slot: Slot, values: Sequence[torch.Tensor]) -> None:
    """Fill the static inputs of a slot."""
    for tensor, new in zip(slot.inputs.tensors, values, strict=True):
        tensor.copy_(new)

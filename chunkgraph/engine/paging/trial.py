"""The trial of a capture session: do the slots of a chunk go on from forwards of each other?"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from functools import partial

import torch

from chunkgraph.engine.capture.restore import restoring, writable
from chunkgraph.engine.capture.session import Session, capture_slot, differing_replay
from chunkgraph.engine.paging.pages import layout_problem, page_moved
from chunkgraph.engine.slot import Slot


class PageTrial:
    """The chunks of a session with fewer slots than microbatches in flight.

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
        if c not in self.paged or c in self.not_paged:
            return
        session = self._session
        settings, backend = session.settings, session.backend
        settings.begin_part(key)
        slots = [slot for slot in session.slots if (slot.bank, slot.chunk) == (key, c)]
        around = partial(restoring, writable(session.chunks[c], session.warm_ups[key][c].written))
        reason = layout_problem(slots)
        for slot, other in zip(slots, [*slots[1:], slots[0]], strict=True):
            if settings.any_rank(bool(reason)) or other is slot:
                break
            sample = [tensor.clone() for tensor in slot.inputs.tensors]
            move = partial(page_moved, slot, other, backend, settings.host, around)
            fill = partial(_fill, slot, sample)
            what, layer = differing_replay(session, slot, move, fill)
            fill()
            if what:
                reason = f"a backward differs where another slot ran its forward ({what}; {layer})"
        if settings.any_rank(bool(reason)):
            self.not_paged[c] = reason or "another rank cannot page its chunk"
        backend.release_cached_memory()

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


def _fill(slot: Slot, sample: Sequence[torch.Tensor]) -> None:
    """Fill the static inputs of a slot."""
    for tensor, values in zip(slot.inputs.tensors, sample, strict=True):
        tensor.copy_(values)

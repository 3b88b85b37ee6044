"""`PagedReplayer`: replay steps whose microbatches leave their slots and come back, by a plan."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from chunkgraph.engine.capture.graph_set import GraphSet
from chunkgraph.engine.chunk import ReplayAction
from chunkgraph.engine.observer import Observer
from chunkgraph.engine.paging.limits import SlotLimit
from chunkgraph.engine.paging.pages import SlotPage
from chunkgraph.engine.replay import Replayer
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import SlotError
from chunkgraph.graphs import GraphBackend
from chunkgraph.graphs.copies import Mark
from chunkgraph.schedules import Op
from chunkgraph.slots import Page, PagePlan, SlotMachine

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight gradient"}
_Key = tuple[int, int]
"""Chunk and microbatch."""


@dataclass(eq=False)
class _Microbatch:
    """A microbatch of a step.

    Attributes:
        key: Its chunk and number.
        turn: The turn of its forward.
        slot: The slot of its latest action, or of its page.
        page: A mark of the last copy of its page, if it has one.
    """

    key: _Key
    turn: int
    slot: Slot
    page: Mark = None


class Pager(Observer):
    """Copy pages on streams of their own, behind and ahead of the replays. The host never waits.

    A page leaves behind its forward. The next user of the slot waits until it is saved: a forward,
    or a page that comes back, which also waits for the actions launched by then. Its backward waits
    until it is back. A buffer on the host serves another forward after that backward.

    It is the last observer, so others see a slot before its page leaves.

    Args:
        captured: The graphs.
        backend: Their backend.

    Attributes:
        plan: The plan of the current or the last step.
        position: The position of the next action in it.
        microbatches: Those of the step so far, by turn.
        host_bytes: Bytes of all buffers on the host.
        moved_bytes: Bytes that the step has moved to the host.
    """

    plan: PagePlan

    def __init__(self, captured: GraphSet, backend: GraphBackend) -> None:
        self._captured, self._backend = captured, backend
        self._copier = backend.new_copier()
        self._pages = {
            slot: SlotPage.of(slot) for c in captured.paged for slot in captured.slots[c]
        }
        self._memory: dict[_Key, torch.Tensor] = {}  # by chunk and place
        self.host_bytes = 0

    def begin(self, plan: PagePlan, machine: PagedSlotMachine) -> None:
        """Follow a plan in the step that begins."""
        self.plan, self._machine = plan, machine
        machine.planned = plan.slots
        self._leaving, self._coming = plan.leaving(), plan.coming()
        self.position = self.moved_bytes = 0
        self.num_forwards = Counter[int]()  # by chunk
        self.microbatches: dict[int, _Microbatch] = {}
        self._of_key: dict[_Key, _Microbatch] = {}
        self._saved: dict[_Key, Mark] = {}  # by chunk and slot number
        for c, place in sorted({(page.key[0], page.place) for page in plan.pages}):
            if (c, place) not in self._memory:
                size = max(self._pages[slot].num_bytes for slot in self._captured.slots[c])
                self._memory[c, place] = self._copier.host_memory(size)
                self.host_bytes += size

    def acquired(self, slot: Slot) -> None:
        """Let the next forward wait for its slot."""
        key = self.plan.keys[self.position]
        own = self.microbatches[slot.turn] = _Microbatch(key, slot.turn, slot)
        self._of_key[key] = own
        self.num_forwards[slot.chunk] += 1
        self._copier.wait(self._saved.pop((slot.chunk, slot.index), None))

    def find(self, turn: int) -> Slot:
        """Return the slot that a microbatch goes on in, which waits for its page."""
        own = self.microbatches[turn]
        self._copier.wait(own.page)
        own.slot.turn = turn
        return own.slot

    def after(self, action: ReplayAction, slot: Slot) -> None:  # noqa: ARG002
        """Launch the copies that follow an action, and those before the next one."""
        if (page := self._leaving.get(self.position)) is not None:
            self._save(page)
        plan, slots = self.plan, self._captured.slots
        while True:
            self.position += 1
            for page in self._coming.get(self.position, ()):
                self._load(page)
            # No replay belongs to the backward of a chunk that has none.
            if (
                self.position == len(plan.actions)
                or plan.actions[self.position].op is Op.F
                or slots[plan.keys[self.position][0]][0].output_grads is not None
            ):
                return

    def end_step(self, *, has_failed: bool) -> None:
        """Wait for copies of a step that failed: the next one uses their memory again."""
        if has_failed:
            self._backend.synchronize()

    def _save(self, page: Page) -> None:
        """Launch the copy of a page to the host, and free its slot."""
        own = self._of_key[page.key]
        bytes_of, slot = self._pages[own.slot], own.slot
        memory, after = bytes_of.on(self._memory[slot.chunk, page.place]), [self._copier.mark()]
        own.page = self._copier.copy(memory, bytes_of.parts, after, to_host=True)
        self._saved[slot.chunk, slot.index] = own.page
        slot.inputs.forget_sources()
        self._machine.move(slot.chunk, slot.index, ~own.turn)
        self.moved_bytes += bytes_of.num_bytes

    def _load(self, page: Page) -> None:
        """Launch the copy of a page into a slot."""
        own, (c, _) = self._of_key[page.key], page.key
        number = self.plan.slots[page.key][1]
        own.slot = self._captured.banks[own.slot.bank].slots[c][number]
        bytes_of = self._pages[own.slot]
        after = [own.page, self._copier.mark(), self._saved.pop((c, number), None)]
        memory = bytes_of.on(self._memory[c, page.place])
        own.page = self._copier.copy(bytes_of.parts, memory, after, to_host=False)
        own.slot.inputs.forget_sources()
        self._machine.move(c, ~own.turn, number)


class PagedSlotMachine(SlotMachine):
    """Slots that microbatches leave and come back to; a paged one counts under no slot's number.

    Attributes:
        planned: For each chunk and microbatch the slots of its forward and of its backward.
    """

    planned: Mapping[_Key, tuple[int, int]] = {}

    def acquire_forward(self, chunk: int) -> int:
        """See `SlotMachine.acquire_forward`; the slot is the planned one."""
        planned = self.planned.get((chunk, self._num_forwards[chunk]))
        of_set = self._set_of[chunk]
        others = 0 if planned is None else self._free[of_set] & ~(1 << planned[0])
        self._free[of_set] ^= others
        try:
            return super().acquire_forward(chunk)
        finally:
            self._free[of_set] ^= others

    def move(self, chunk: int, source: int, target: int) -> None:
        """Let a microbatch leave a slot, or come back into one.

        Args:
            chunk: Index of the model chunk.
            source: Number of its slot; ``~turn`` if it has none.
            target: Likewise.

        Raises:
            SlotError: The slot is in use.
        """
        if (chunk, target) in self._uses:
            self._refuse("page in", chunk, target, "keep to the schedule that was planned")
        use = self._uses[chunk, target] = self._uses.pop((chunk, source))
        self._free[self._set_of[chunk]] ^= 1 << max(source, target)
        name = "page out" if target < 0 else "page in"
        self._events.append((name, chunk, use.microbatch, max(source, target)))


class PagedReplayer(Replayer):
    """Replay the slots of one rank by a plan of pages, if any of its chunks is paged.

    Then nothing is received into slots: the one that a microbatch takes may still be in use when
    the receive begins. So no rank ever waits for a slot with a receive posted.

    Args:
        limit: The limit of the slots, with the schedule of each step.
        backend: The backend of the graphs.
        settings: As `Replayer` takes them.
    """

    machine = PagedSlotMachine
    _machine: PagedSlotMachine

    def __init__(
        self, *args: Any, limit: SlotLimit, backend: GraphBackend, **settings: Any
    ) -> None:
        self._limit, self._backend = limit, backend
        self._pager: Pager | None = None
        self._plans: dict[int, PagePlan] = {}
        super().__init__(*args, **settings)

    def take(self, captured: GraphSet) -> None:
        """See `Replayer.take`."""
        super().take(captured)
        self._pager = Pager(captured, self._backend) if captured.paged else None
        self._plans = {}
        self._forget_microbatches()

    @contextmanager
    def step(self, num_microbatches: int | None, observers: Sequence[Observer]) -> Iterator[None]:
        """Enclose one replayed step; see `Replayer.step`.

        Raises:
            ConfigError: A chunk has too few slots for the number of microbatches.
        """
        captured, pager = self._captured, self._pager
        assert captured is not None
        assert num_microbatches is not None
        if pager is not None:
            if num_microbatches not in self._plans:
                counts = [
                    count if c in captured.paged else None
                    for c, count in enumerate(captured.report.num_slots)
                ]
                self._plans[num_microbatches] = self._limit.plan(num_microbatches, counts)
            pager.begin(self._plans[num_microbatches], self._machine)
            observers = (*observers, pager)
        with super().step(num_microbatches, observers):
            yield

    def reserve_input(self, c: int, index: int = 0, *, num_before: int = 0) -> torch.Tensor | None:
        """See `Replayer.reserve_input`."""
        if self._pager is not None:
            return None  # receive elsewhere
        return super().reserve_input(c, index, num_before=num_before)

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor]:
        """See `Replayer.replay_backward`; ``slot`` is that of the forward."""
        # A turn of another step is refused by the slots.
        if self._pager is not None and turn in self._pager.microbatches:
            self._expect(Op.B, self._pager.microbatches[turn].key)
            slot = self._pager.find(turn)
        return super().replay_backward(slot, turn, grads)

    def run_waiting(self, c: int, turn: int | None) -> None:
        """See `Replayer.run_waiting`."""
        waiting = self._machine.waiting(c)
        if self._pager is not None and waiting and turn in (None, waiting[0]):
            self._expect(Op.W, self._pager.microbatches[waiting[0]].key)
        super().run_waiting(c, turn)

    def drop(self) -> None:
        """See `Replayer.drop`."""
        self._pager = None
        super().drop()

    def _acquire(self, c: int, key: Hashable) -> Slot:
        if self._pager is None:
            return super()._acquire(c, key)
        self._expect(Op.F, (c, self._pager.num_forwards[c]))
        slot = super()._acquire(c, key)
        self._pager.acquired(slot)
        return slot

    def _expect(self, op: Op, key: _Key) -> None:
        """Check that this is the action of the schedule that comes now.

        Raises:
            SlotError: It is another one.
        """
        assert self._pager is not None
        plan, at = self._pager.plan, self._pager.position
        now = f"the {_NAMES[op]} of microbatch {key[1]} of chunk {key[0]}"
        planned = "the end"
        if at < len(plan.actions):
            c, microbatch = plan.keys[at]
            planned = f"the {_NAMES[plan.actions[at].op]} of microbatch {microbatch} of chunk {c}"
        if now != planned:
            raise SlotError(
                f"{self._label}: {now} runs, but the schedule by which the pages were planned has "
                f"{planned} (action {at}).\n"
                "  To do: pass the schedule that the loop runs (ChunkGraphs(schedule=...), or "
                "for_schedule), or leave out max_slots and max_slot_memory."
            )

    def _forget_microbatches(self) -> None:
        super()._forget_microbatches()
        if self._pager is not None:
            # The backward may run in another slot, so no gradient is received into one.
            self._awaiting_grads = tuple(deque[Slot](maxlen=0) for _ in self._chunks)

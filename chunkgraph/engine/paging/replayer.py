"""`PagedReplayer`: replay steps whose microbatches leave their slots and come back, by a plan."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
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
from chunkgraph.schedules import Op
from chunkgraph.slots import Page, PagePlan, SlotMachine

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight gradient"}
_Key = tuple[int, int]
"""Chunk and microbatch."""


class Pager(Observer):
    """Copy pages on streams of their own, behind and ahead of the replays. The host never waits.

    A page leaves behind its forward. The next user of the slot waits until it is saved: a forward,
    or a page that comes back, which also waits for the actions launched by then. Its backward waits
    until it is back. A buffer on the host serves another forward after that backward.

    Args:
        captured: The graphs.
        backend: Their backend.

    Attributes:
        host_bytes: Bytes of all buffers on the host.
        moved_bytes: Bytes that the current or the last step moved to the host.
    """

    def __init__(self, captured: GraphSet, backend: GraphBackend) -> None:
        self._captured, self._backend = captured, backend
        self._copier = backend.new_copier()
        self._pages = {
            slot: SlotPage.of(slot) for c in captured.paged for slot in captured.slots[c]
        }
        self._memory: dict[_Key, torch.Tensor] = {}  # by chunk and place
        self.host_bytes = self.moved_bytes = 0

    def begin(self, plan: PagePlan, machine: PagedSlotMachine) -> None:
        """Follow a plan in the step that begins."""
        self.plan, self._machine = plan, machine
        self._leaving, self._coming = plan.leaving(), plan.coming()
        self.position = self.moved_bytes = 0
        self.num_forwards = Counter[int]()  # by chunk
        self.held: dict[_Key, Slot] = {}  # the slot of a microbatch's forward
        self.turns: dict[_Key, int] = {}  # and its turn
        self.microbatches: dict[int, int] = {}  # by turn
        self._sources: dict[_Key, list[Any]] = {}
        # Marks: a page is on the host, by slot; and in a slot again, by turn.
        self._saved: dict[_Key, Any] = {}
        self._left: dict[_Key, Any] = {}
        self._back: dict[int, Any] = {}
        for c, num_places in enumerate(plan.num_places):
            for place in range(num_places):
                if (c, place) not in self._memory:
                    size = max(self._pages[slot].num_bytes for slot in self._captured.slots[c])
                    self._memory[c, place] = self._copier.host_memory(size)
                    self.host_bytes += size

    def slot_of(self, key: _Key) -> Slot:
        """Return the slot of a microbatch's backward."""
        slot = self.held[key]
        if key[0] not in self._captured.paged:
            return slot
        return self._captured.banks[slot.bank].slots[key[0]][self.plan.slots[key][1]]

    def before(self, action: ReplayAction, slot: Slot, tensors: object) -> None:  # noqa: ARG002
        """Let a replay wait for its slot, or for its page."""
        if action == "F":
            mark = self._left.pop((slot.chunk, slot.index), None)
        else:
            mark = self._back.pop(slot.turn, None)
        if mark is not None:
            self._copier.wait(mark)

    def after(self, action: ReplayAction, slot: Slot) -> None:
        """Launch the copies that follow an action, and those before the next one."""
        page = self._leaving.get(self.position)
        if action == "F" and page is not None:
            self._save(page, slot)
        plan, slots = self.plan, self._captured.slots
        while True:
            self.position += 1
            for page in self._coming.get(self.position, ()):
                self._load(page)
            # No replay belongs to the backward of a chunk that has none.
            if (
                self.position == len(plan.actions)
                or plan.actions[self.position].op is Op.F
                or slots[plan.chunks[self.position]][0].output_grads is not None
            ):
                return

    def end_step(self, *, has_failed: bool) -> None:
        """Wait for copies of a step that failed: the next one uses their memory again."""
        if has_failed:
            self._backend.synchronize()

    def _save(self, page: Page, slot: Slot) -> None:
        """Launch the copy of a page to the host, and free its slot."""
        own, sources = self._pages[slot], list(slot.inputs.sources)
        moves = list(zip(own.on(self._memory[page.chunk, page.place]), own.parts, strict=True))
        dead = own.kept if any(sources) else own.parts  # constant inputs stay loaded
        mark = self._copier.copy(moves, [self._copier.mark()], to_host=True, dead=dead)
        self._saved[page.key] = self._left[page.chunk, slot.index] = mark
        self._sources[page.key] = sources
        self._machine.page_out(page.chunk, slot.index)
        self.moved_bytes += own.num_bytes

    def _load(self, page: Page) -> None:
        """Launch the copy of a page into a slot."""
        slot, turn = self.slot_of(page.key), self.turns[page.key]
        own = self._pages[slot]
        moves = list(zip(own.parts, own.on(self._memory[page.chunk, page.place]), strict=True))
        after = [self._saved.pop(page.key), self._copier.mark()]
        if (left := self._left.pop((page.chunk, slot.index), None)) is not None:
            after.append(left)
        self._back[turn] = self._copier.copy(moves, after, to_host=False)
        slot.inputs.sources = self._sources.pop(page.key)
        self._machine.page_in(page.chunk, slot.index, turn)


class PagedSlotMachine(SlotMachine):
    """Slots that microbatches leave and come back to; a paged one counts under no slot's number."""

    def acquire_slot(self, chunk: int, slot: int) -> None:
        """Acquire this slot of a chunk for its next forward.

        Raises:
            SlotError: It is not free.
        """
        of_set = self._set_of[chunk]
        others = self._free[of_set] & ~(1 << slot)
        self._free[of_set] -= others
        try:
            self.acquire_forward(chunk)
        finally:
            self._free[of_set] += others

    def page_out(self, chunk: int, slot: int) -> None:
        """Free a slot whose microbatch goes on without one until `page_in`."""
        use = self._uses.pop((chunk, slot))
        self._uses[chunk, ~use.turn] = use
        self._free[self._set_of[chunk]] |= 1 << slot
        self._events.append(("page out", chunk, use.microbatch, slot))

    def page_in(self, chunk: int, slot: int, turn: int) -> None:
        """Give a slot to a microbatch that was paged out.

        Args:
            chunk: Index of the model chunk.
            slot: Number of the slot.
            turn: Turn of the microbatch's forward.

        Raises:
            SlotError: The slot is in use.
        """
        of_set = self._set_of[chunk]
        if not self._free[of_set] >> slot & 1:
            self._refuse("page in", chunk, slot, "keep to the schedule that was planned")
        use = self._uses[chunk, slot] = self._uses.pop((chunk, ~turn))
        self._free[of_set] ^= 1 << slot
        self._events.append(("page in", chunk, use.microbatch, slot))


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
        if pager is None:
            with super().step(num_microbatches, observers):
                yield
            return
        if num_microbatches not in self._plans:
            counts = [
                n if c in captured.paged else None for c, n in enumerate(captured.report.num_slots)
            ]
            self._plans[num_microbatches] = self._limit.plan(num_microbatches, counts)
        pager.begin(self._plans[num_microbatches], self._machine)
        with super().step(num_microbatches, (*observers, pager)):
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
        pager, c = self._pager, slot.chunk
        # A turn of another step is refused by the slots.
        if pager is not None and turn in pager.microbatches:
            self._expect(Op.B, c, pager.microbatches[turn])
            slot = pager.slot_of((c, pager.microbatches[turn]))
            slot.turn = turn
        return super().replay_backward(slot, turn, grads)

    def run_waiting(self, c: int, turn: int | None) -> None:
        """See `Replayer.run_waiting`."""
        waiting, pager = self._machine.waiting(c), self._pager
        if pager is not None and waiting and turn in (None, waiting[0]):
            self._expect(Op.W, c, pager.microbatches[waiting[0]])
        super().run_waiting(c, turn)

    def drop(self) -> None:
        """See `Replayer.drop`."""
        self._pager = None
        super().drop()

    def _acquire(self, c: int, key: Hashable, number: int | None = None) -> Slot:
        pager = self._pager
        if pager is None:
            return super()._acquire(c, key)
        microbatch = pager.num_forwards[c]
        self._expect(Op.F, c, microbatch)
        if self._captured is not None and c in self._captured.paged:
            number = pager.plan.slots[c, microbatch][0]
            self._machine.acquire_slot(c, number)
        slot = super()._acquire(c, key, number)
        pager.held[c, microbatch], pager.turns[c, microbatch] = slot, slot.turn
        pager.microbatches[slot.turn] = microbatch
        pager.num_forwards[c] += 1
        return slot

    def _expect(self, op: Op, c: int, microbatch: int) -> None:
        """Check that this is the action of the schedule that comes now.

        Raises:
            SlotError: It is another one.
        """
        assert self._pager is not None
        plan, at = self._pager.plan, self._pager.position
        planned = "the end"
        if at < len(plan.actions):
            action = plan.actions[at]
            now = _NAMES[action.op], plan.chunks[at], action.microbatch
            if now == (_NAMES[op], c, microbatch):
                return
            planned = f"the {now[0]} of microbatch {now[2]} of chunk {now[1]}"
        raise SlotError(
            f"{self._label}: the {_NAMES[op]} of microbatch {microbatch} of chunk {c} runs, but "
            f"the schedule by which the pages were planned has {planned} (action {at}).\n"
            "  To do: pass the schedule that the loop runs (ChunkGraphs(schedule=...), or "
            "for_schedule), or leave out max_slots and max_slot_memory."
        )

    def _forget_microbatches(self) -> None:
        super()._forget_microbatches()
        if self._pager is None:
            return
        # The backward may run in another slot, so no gradient is received into one.
        self._awaiting_grads = tuple(deque[Slot](maxlen=0) for _ in self._chunks)

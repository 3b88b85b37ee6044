"""`PagedReplayer`: replay steps whose microbatches leave their slots and come back, by a plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from chunkgraph.engine.capture.graph_set import GraphSet
from chunkgraph.engine.observer import Observer
from chunkgraph.engine.paging.pages import page_of
from chunkgraph.engine.replay import Replayer
from chunkgraph.engine.slot import Slot
from chunkgraph.errors import SlotError
from chunkgraph.graphs import Copier, GraphBackend
from chunkgraph.graphs.copies import Mark
from chunkgraph.schedules import Op
from chunkgraph.slots import Page, PagePlan, SlotMachine

_NAMES = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weight gradient"}
Planner = Callable[[Sequence[int | None]], Callable[[int | None], PagePlan]]
_Key = tuple[int, int]
"""Chunk and microbatch."""


class PagedSlotMachine(SlotMachine):
    """Slots that microbatches leave and come back to; a paged one counts under no slot's number.

    The free slot that is saved first is taken first, as `PageClock` simulates it.

    Attributes:
        saved: When what left is on the host, by chunk and number of free slots, in order.
    """

    def begin_step(self) -> None:
        """See `SlotMachine.begin_step`."""
        super().begin_step()
        self.saved: dict[tuple[int, int], Mark] = {}

    def next_key(self, chunk: int) -> _Key:
        """Return chunk and microbatch of the next forward of ``chunk``."""
        return chunk, self._num_forwards[chunk]

    def page_out(self, chunk: int, slot: int) -> None:
        """Free a slot, whose microbatch goes on without one."""
        use = self._uses.pop((chunk, slot))
        self._uses[chunk, ~use.microbatch] = use
        self._free[self._set_of[chunk]] |= 1 << slot
        self._events.append(("page out", chunk, use.microbatch, slot))

    def page_in(self, chunk: int, microbatch: int) -> tuple[int, Mark]:
        """Give a microbatch that has none a slot; return its number, and when it is saved."""
        slot = self._next_free(chunk)
        self._free[self._set_of[chunk]] ^= 1 << slot
        self._uses[chunk, slot] = self._uses.pop((chunk, ~microbatch))
        self._events.append(("page in", chunk, microbatch, slot))
        return slot, self.saved.pop((chunk, slot), None)

    def _next_free(self, chunk: int) -> int:
        free = self._free[self._set_of[chunk]]
        slots = (s for s in range(free.bit_length()) if free >> s & 1)
        idle = [s for s in slots if (chunk, s) not in self.saved]
        return idle[0] if idle else next(s for c, s in self.saved if c == chunk)


class PagedReplayer(Replayer):
    """Replay the slots of one rank by a plan of pages, if any of its chunks is paged.

    Pages are copied on streams of their own, behind and ahead of the replays. The host never waits.
    A page leaves behind its forward. The next user of the slot waits until it is saved: a forward,
    or a page that comes back, which also waits for the actions launched by then. Its backward waits
    until it is back. A buffer on the host serves another forward after that backward. Observers see
    a slot before its page leaves, and after it is back.

    Nothing is received into slots: the one that a microbatch takes may still be in use when the
    receive begins. So no rank ever waits for a slot with a receive posted.

    Args:
        plans: Returns, from the number of slots of each chunk (None for one that is not paged),
            what plans a step of some microbatches, or raises alike on all ranks. They all call it.
        backend: The backend of the graphs.
        settings: As `Replayer` takes them.
    """

    machine = PagedSlotMachine
    _machine: PagedSlotMachine
    _copier: Copier
    _plan: PagePlan

    def __init__(self, *args: Any, plans: Planner, backend: GraphBackend, **settings: Any) -> None:
        self._plans, self._backend = plans, backend
        self._pages: dict[Slot, Sequence[torch.Tensor]] = {}
        self._memory: list[list[torch.Tensor]] = []  # of the host, by chunk
        super().__init__(*args, **settings)

    def take(self, captured: GraphSet) -> None:
        """See `Replayer.take`."""
        super().take(captured)
        self._pages = {slot: page_of(slot) for c in captured.paged for slot in captured.slots[c]}
        self._copier = self._backend.new_copier()
        counts = enumerate(captured.report.num_slots)
        self._plan_of = self._plans([n if c in captured.paged else None for c, n in counts])
        self._memory = [[] for _ in self._chunks]
        self._forget_microbatches()

    def drop(self) -> None:
        """See `Replayer.drop`."""
        self._pages, self._memory = {}, [[] for _ in self._chunks]
        super().drop()

    @contextmanager
    def step(self, num_microbatches: int | None, observers: Sequence[Observer]) -> Iterator[None]:
        """Enclose one replayed step; see `Replayer.step`.

        Raises:
            ConfigError: A chunk of any rank has too few slots for the number of microbatches.
        """
        self._begin(num_microbatches)
        try:
            with super().step(num_microbatches, observers):
                yield
        except BaseException:
            self._backend.synchronize()  # the next step uses the memory of pages again
            raise

    def _begin(self, num_microbatches: int | None) -> None:
        """Plan the pages of a step that begins."""
        captured = self._captured
        assert captured is not None
        self._plan = plan = self._plan_of(num_microbatches)
        self._leaving, self._coming = plan.leaving(), plan.coming()
        self._position = 0
        self._forget_microbatches()
        for c, count in enumerate(plan.num_buffers):
            for _ in range(count - len(self._memory[c])):
                sizes = (sum(p.numel() for p in self._pages[s]) for s in captured.slots[c])
                self._memory[c].append(self._copier.host_memory(max(sizes)))
        self._idle = [[*buffers] for buffers in self._memory]

    def reserve_input(self, c: int, index: int = 0, *, num_before: int = 0) -> torch.Tensor | None:
        """See `Replayer.reserve_input`."""
        if self._pages:
            return None  # receive elsewhere
        return super().reserve_input(c, index, num_before=num_before)

    def replay_forward(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """See `Replayer.replay_forward`."""
        super().replay_forward(slot, tensors)
        self._advance()

    def replay_backward(
        self, slot: Slot, turn: int, grads: tuple[torch.Tensor | None, ...]
    ) -> list[torch.Tensor]:
        """See `Replayer.replay_backward`; ``slot`` is that of the forward."""
        # A turn of another step is refused by the slots.
        if (key := self._keys.get(turn)) is not None:
            self._expect(Op.B, key)
            self._copier.wait(self._copied.pop(key, None))
            slot = self._holders[key]
            slot.turn = turn
            if key in self._away:  # the backward waits for the copy, and later copies for it
                self._idle[key[0]].append(self._away.pop(key))
        result = super().replay_backward(slot, turn, grads)
        self._advance()
        return result

    def run_waiting(self, c: int, turn: int | None) -> None:
        """See `Replayer.run_waiting`."""
        waiting = self._machine.waiting(c)
        if self._pages and waiting and turn in (None, waiting[0]):
            self._expect(Op.W, self._keys[waiting[0]])
        super().run_waiting(c, turn)
        self._advance()

    def _acquire(self, c: int, key: Hashable) -> Slot:
        if not self._pages:
            return super()._acquire(c, key)
        of_microbatch = self._machine.next_key(c)
        self._expect(Op.F, of_microbatch)
        slot = self._holders[of_microbatch] = super()._acquire(c, key)
        self._keys[slot.turn] = of_microbatch
        self._copier.wait(self._machine.saved.pop((c, slot.index), None))
        return slot

    def _expect(self, op: Op, key: _Key) -> None:
        """Check that this is the action of the schedule that comes now.

        Raises:
            SlotError: It is another one.
        """
        plan, at = self._plan, self._position
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

    def _advance(self) -> None:
        """Launch the copies that follow an action, and those before the next one."""
        if not self._pages:
            return
        assert self._captured is not None
        if (page := self._leaving.get(self._position)) is not None:
            self._save(page)
        plan, slots = self._plan, self._captured.slots
        while True:
            self._position += 1
            for page in self._coming.get(self._position, ()):
                self._load(page)
            # No replay belongs to the backward of a chunk that has none.
            if (
                self._position == len(plan.actions)
                or plan.actions[self._position].op is Op.F
                or slots[plan.keys[self._position][0]][0].output_grads is not None
            ):
                return

    def _save(self, page: Page) -> None:
        """Launch the copy of a page to the host, and free its slot."""
        (c, _), slot = page.key, self._holders[page.key]
        memory = self._away[page.key] = self._idle[c].pop()
        after = [self._copier.mark()]
        mark = self._copier.copy(self._pages[slot], memory, after, to_host=True)
        self._copied[page.key] = self._machine.saved[c, slot.index] = mark
        slot.inputs.forget_sources()
        self._machine.page_out(c, slot.index)

    def _load(self, page: Page) -> None:
        """Launch the copy of a page into a slot."""
        assert self._captured is not None
        (c, microbatch), key = page.key, self._holders[page.key].bank
        index, is_saved = self._machine.page_in(c, microbatch)
        slot = self._holders[page.key] = self._captured.banks[key].slots[c][index]
        after = self._copied[page.key], is_saved, self._copier.mark()
        parts, memory = self._pages[slot], self._away[page.key]
        self._copied[page.key] = self._copier.copy(parts, memory, after, to_host=False)
        slot.inputs.forget_sources()

    def _forget_microbatches(self) -> None:
        super()._forget_microbatches()
        self._keys: dict[int, _Key] = {}  # of microbatches by turn
        self._holders: dict[_Key, Slot] = {}  # which slot a microbatch has, or had last
        self._away: dict[_Key, torch.Tensor] = {}  # the memory of pages
        self._copied: dict[_Key, Mark] = {}  # when its page is on the host, or in the slot again
        if self._pages:
            # The backward may run in another slot, so no gradient is received into one.
            self._awaiting_grads = tuple(deque[Slot](maxlen=0) for _ in self._chunks)

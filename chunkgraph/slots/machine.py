"""Track the slots of one rank while a step runs.

A slot goes FREE -> FORWARD_DONE -> BACKWARD -> FREE. A split backward goes from BACKWARD to
WEIGHT_PENDING -> WEIGHT -> FREE. Any other transition is refused, because a graph that is replayed
into a slot in use silently computes wrong results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import NoReturn

from chunkgraph.errors import SlotError
from chunkgraph.schedules import Schedule

from .report import Event, describe_misuse

__all__ = ["SlotMachine", "SlotState"]


class SlotState(Enum):
    """The state of a slot."""

    FREE = "free"
    FORWARD_DONE = "forward done, waits for its backward"
    BACKWARD = "in backward"
    WEIGHT_PENDING = "input gradient done, waits for its weight gradient"
    WEIGHT = "in weight gradient"


_FORWARD_DONE = SlotState.FORWARD_DONE
_RUNNING = (SlotState.BACKWARD, SlotState.WEIGHT)


class _Use:
    """The microbatch that holds a slot."""

    __slots__ = ("microbatch", "state", "turn")

    def __init__(self, microbatch: int, turn: int) -> None:
        self.microbatch = microbatch
        self.turn = turn
        self.state = SlotState.FORWARD_DONE


class SlotMachine:
    """Assign and release the slots of one rank's model chunks.

    A step is ``begin_step``, then any legal order of ``acquire_forward``, ``begin_backward`` and
    ``release``, then ``end_step``, or ``abort_step`` after an exception. With a split backward,
    ``defer_weight`` and ``begin_weight`` come before ``release``. Every call costs a few list
    operations, independent of the number of slots. Not thread-safe.

    Args:
        num_slots: Number of slots of each chunk.
        label: Owner of the slots, such as ``rank 1``, for messages.
        are_shared: Whether slot ``k`` is the same slot in every chunk, holding one microbatch of
            one of them; all counts must then be equal.
        schedule: If set, messages also show the rank's position in it; see ``begin_step``.
        rank: The rank in ``schedule``.

    Attributes:
        latest_turn: Unique number of the latest forward that acquired a slot.
    """

    def __init__(
        self,
        num_slots: Sequence[int],
        label: str,
        schedule: Schedule | None = None,
        rank: int = 0,
        *,
        are_shared: bool = False,
    ) -> None:
        if not num_slots or min(num_slots) < 1:
            raise SlotError(f"{label}: every chunk needs at least one slot, got {list(num_slots)}")
        if are_shared and len(set(num_slots)) > 1:
            raise SlotError(f"{label}: shared slots, but counts {list(num_slots)}; pass equal ones")
        self._num_slots = tuple(num_slots)
        # The set that each chunk acquires its slots from.
        self._set_of = tuple(0 if are_shared else chunk for chunk in range(len(num_slots)))
        self._label = label
        self._schedule = schedule
        self._rank = rank
        self._in_step = False
        self.latest_turn = 0
        self._events: list[Event] = []
        self._reset()

    @property
    def num_slots(self) -> tuple[int, ...]:
        """Return the number of slots of each chunk."""
        return self._num_slots

    @property
    def label(self) -> str:
        """Return the owner of the slots, for messages."""
        return self._label

    @property
    def in_step(self) -> bool:
        """Return whether a step is running."""
        return self._in_step

    @property
    def num_busy(self) -> int:
        """Return the number of slots in use in all chunks together."""
        sets = zip(self._free, self._num_slots, strict=False)
        return sum(count - free.bit_count() for free, count in sets)

    def num_free(self, chunk: int) -> int:
        """Return the number of free slots of ``chunk``."""
        return self._free[self._set_of[chunk]].bit_count()

    def state(self, chunk: int, slot: int) -> SlotState:
        """Return the state of a slot."""
        self._check_place("state", chunk, None, slot)
        holder = self._holder(chunk, slot)
        return SlotState.FREE if holder is None else self._uses[holder, slot].state

    def microbatch(self, chunk: int, slot: int) -> int | None:
        """Return the microbatch that a slot holds, None if it is free."""
        self._check_place("state", chunk, None, slot)
        holder = self._holder(chunk, slot)
        return None if holder is None else self._uses[holder, slot].microbatch

    def _holder(self, chunk: int, slot: int) -> int | None:
        """Return the chunk whose microbatch is in a slot that ``chunk`` may use."""
        of_set = self._set_of[chunk]
        return next((c for c, s in self._uses if s == slot and self._set_of[c] == of_set), None)

    def begin_step(self, schedule: Schedule | None = None) -> None:
        """Start a step.

        Args:
            schedule: The schedule of this and later steps, used only for messages.

        Raises:
            SlotError: A step is running already.
        """
        if self._in_step:
            self._refuse(
                "begin step", None, None, None, "a step is already running",
                "call end_step() after the schedule returns, abort_step() after an exception",
            )  # fmt: skip
        if schedule is not None:
            self._schedule = schedule
        self._events.clear()
        self._num_forwards = [0] * len(self._num_slots)
        self._in_step = True

    def acquire_forward(self, chunk: int, microbatch: int | None = None) -> int:
        """Acquire the lowest free slot of a chunk for a forward.

        Args:
            chunk: Index of the model chunk.
            microbatch: Microbatch number for messages; None counts the chunk's forwards.

        Returns:
            The slot number.

        Raises:
            SlotError: Outside a step, unknown chunk, or no slot is free.
        """
        if not (self._in_step and 0 <= chunk < len(self._num_slots)):
            self._check_in_step("forward", chunk, microbatch, None)
            self._check_place("forward", chunk, microbatch, None)
        if microbatch is None:
            microbatch = self._num_forwards[chunk]
        of_set = self._set_of[chunk]
        free = self._free[of_set]
        if not free:
            owner = (
                f"chunk {chunk}" if len(self._free) > 1 or len(self._set_of) == 1 else "the rank"
            )
            self._refuse(
                "forward", chunk, microbatch, None,
                f"all {self._num_slots[chunk]} slots of {owner} are in use",
                "plan the slots for the schedule that actually runs (chunkgraph plan), or check "
                "that every forward is followed by its backward",
            )  # fmt: skip
        lowest = free & -free
        slot = lowest.bit_length() - 1
        self._free[of_set] = free ^ lowest
        self._num_forwards[chunk] += 1
        self.latest_turn = turn = self.latest_turn + 1
        self._uses[chunk, slot] = _Use(microbatch, turn)
        self._events.append(("forward", chunk, microbatch, slot))
        return slot

    def begin_backward(self, chunk: int, slot: int, turn: int | None = None) -> None:
        """Start the backward of the microbatch in a slot.

        Args:
            chunk: Index of the model chunk.
            slot: Number of the slot.
            turn: Turn of the backward's forward (`latest_turn`); None to accept any.

        Raises:
            SlotError: Outside a step, unknown chunk or slot, or the slot holds no finished forward
                or that of another microbatch.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state is not _FORWARD_DONE or (turn is not None and turn != use.turn):
            self._refuse_backward(chunk, slot, use)
        use.state = SlotState.BACKWARD
        self._events.append(("backward", chunk, use.microbatch, slot))

    def _refuse_backward(self, chunk: int, slot: int, use: _Use | None) -> NoReturn:
        self._check_holds("backward", chunk, slot)
        if use is None:
            problem = f"slot {slot} is free, there is nothing to run backward"
            advice = (
                "run the forward first, and each backward only once (retain_graph does not work "
                "with slots)"
            )
        elif use.state in (SlotState.WEIGHT_PENDING, SlotState.WEIGHT):
            problem = f"slot {slot} has its input gradient already"
            advice = "run each backward only once"
        elif use.state is SlotState.BACKWARD:
            problem, advice = f"slot {slot} is in backward already", "run each backward only once"
        else:
            problem = f"slot {slot} now holds another microbatch; this one's forward is gone"
            advice = (
                "run each backward once, in the step of its forward (retain_graph does not work "
                "with slots)"
            )
        self._refuse("backward", chunk, None, slot, problem, advice)

    def defer_weight(self, chunk: int, slot: int) -> None:
        """Mark that a slot's input gradient is done and its weight gradient is pending.

        Raises:
            SlotError: Outside a step, unknown chunk or slot, or the slot is not in backward.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state is not SlotState.BACKWARD:
            self._refuse_end("defer weight", chunk, slot, use)
        use.state = SlotState.WEIGHT_PENDING
        self._pending[chunk].append(slot)
        self._events.append(("input gradient", chunk, use.microbatch, slot))

    def pending(self, chunk: int) -> tuple[int, ...]:
        """Return the turns of ``chunk`` that wait for their weight gradient, oldest first."""
        return tuple(self._uses[chunk, slot].turn for slot in self._pending[chunk])

    def begin_weight(self, chunk: int, turn: int | None = None) -> int:
        """Mark that the weight gradient that waits longest starts.

        Args:
            chunk: Index of the model chunk.
            turn: Turn of the forward whose weight gradient starts; None to accept any.

        Returns:
            The slot number.

        Raises:
            SlotError: Outside a step, unknown chunk, no weight gradient waits, or another one has
                waited longer: the sums of weight gradients would have other bits.
        """
        self._check_in_step("weight", chunk, None, None)
        self._check_place("weight", chunk, None, None)
        waiting = self._pending[chunk]
        use = self._uses[chunk, waiting[0]] if waiting else None
        if use is None or (turn is not None and turn != use.turn):
            self._refuse_weight(chunk, turn)
        slot = waiting.popleft()
        use.state = SlotState.WEIGHT
        self._events.append(("weight", chunk, use.microbatch, slot))
        return slot

    def _refuse_weight(self, chunk: int, turn: int | None) -> NoReturn:
        waiting = self._pending[chunk]
        turns = {self._uses[chunk, slot].turn: slot for slot in waiting}
        if turn in turns:
            first = self._uses[chunk, waiting[0]].microbatch
            slot = turns[turn]
            self._refuse(
                "weight", chunk, self._uses[chunk, slot].microbatch, slot,
                f"the weight gradient of microbatch {first} comes first, or the sums would have "
                "other bits",
                "run the weight gradients of a chunk in the order of its input gradients",
            )  # fmt: skip
        self._refuse(
            "weight", chunk, None, None,
            "no microbatch waits for its weight gradient" if turn is None
            else "this microbatch's weight gradient has been run already",
            "run each weight gradient once, after the backward of its microbatch",
        )  # fmt: skip

    def release(self, chunk: int, slot: int) -> None:
        """Free a slot after its backward (after W if the backward is split).

        Raises:
            SlotError: Outside a step, unknown chunk or slot, or the slot is not in backward.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state not in _RUNNING:
            self._refuse_end("release", chunk, slot, use)
        del self._uses[chunk, slot]
        self._free[self._set_of[chunk]] |= 1 << slot
        self._events.append(("release", chunk, use.microbatch, slot))

    def _refuse_end(self, call: str, chunk: int, slot: int, use: _Use | None) -> NoReturn:
        self._check_holds(call, chunk, slot)
        if use is None:
            problem, advice = "is free already", "release each slot once"
        elif use.state is SlotState.FORWARD_DONE:
            problem, advice = "still waits for its backward", "call begin_backward() first"
        elif use.state is SlotState.WEIGHT:
            problem, advice = "is in its weight gradient already", "run each weight gradient once"
        else:
            problem, advice = "still waits for its weight gradient", "call begin_weight() first"
        self._refuse(call, chunk, None, slot, f"slot {slot} {problem}", advice)

    def end_step(self) -> None:
        """End a step.

        Raises:
            SlotError: Outside a step, or a slot is still in use; the step then continues.
        """
        self._check_in_step("end step", None, None, None)
        if waiting := [(c, s) for c, slots in enumerate(self._pending) for s in slots]:
            names = ", ".join(
                f"microbatch {self._uses[place].microbatch} of chunk {place[0]}"
                for place in waiting
            )
            self._refuse(
                "end step", None, None, None,
                f"{len(waiting)} weight gradients were not run ({names})",
                "run the weight gradient of every microbatch before the step ends",
            )  # fmt: skip
        if busy := self.num_busy:
            self._refuse(
                "end step", None, None, None, f"{busy} slots are still in use",
                "run a backward for every forward before the step ends; for forward-only "
                "evaluation disable gradients, or use the eager model",
            )  # fmt: skip
        self._in_step = False

    def abort_step(self) -> None:
        """Free all slots after an exception, in any state; allowed outside a step."""
        self._reset()
        self._in_step = False

    def _reset(self) -> None:
        counts = [self._num_slots[of_set] for of_set in dict.fromkeys(self._set_of)]
        # Bit s of a set's number is set while its slot s is free.
        self._free = [(1 << count) - 1 for count in counts]
        self._uses: dict[tuple[int, int], _Use] = {}  # by chunk and slot, of slots in use
        self._num_forwards = [0] * len(self._num_slots)
        self._pending = tuple(deque[int]() for _ in self._num_slots)

    def _check_holds(self, what: str, chunk: int, slot: int) -> None:
        if not (
            self._in_step
            and 0 <= chunk < len(self._num_slots)
            and 0 <= slot < self._num_slots[chunk]
        ):
            self._check_in_step(what, chunk, None, slot)
            self._check_place(what, chunk, None, slot)
        holder = self._holder(chunk, slot)
        if holder is not None and holder != chunk:
            self._refuse(
                what, chunk, None, slot, f"slot {slot} holds a microbatch of chunk {holder}",
                "pass the chunk that acquire_forward() was called with",
            )  # fmt: skip

    def _check_in_step(
        self, what: str, chunk: int | None, microbatch: int | None, slot: int | None
    ) -> None:
        if not self._in_step:
            self._refuse(
                what, chunk, microbatch, slot, "no step is running",
                "run every forward and its backward inside one step (`with graphs.step(...)`)",
            )  # fmt: skip

    def _check_place(self, what: str, chunk: int, microbatch: int | None, slot: int | None) -> None:
        if not 0 <= chunk < len(self._num_slots):
            self._refuse(
                what, chunk, microbatch, slot,
                f"there is no chunk {chunk}, only 0..{len(self._num_slots) - 1}",
                "pass the index of the model chunk on this rank, not its global stage",
            )  # fmt: skip
        if slot is not None and not 0 <= slot < self._num_slots[chunk]:
            self._refuse(
                what, chunk, microbatch, slot,
                f"chunk {chunk} has no slot {slot}, only 0..{self._num_slots[chunk] - 1}",
                "pass the slot that acquire_forward() returned",
            )  # fmt: skip

    def _refuse(
        self,
        what: str,
        chunk: int | None,
        microbatch: int | None,
        slot: int | None,
        problem: str,
        advice: str,
    ) -> NoReturn:
        busy = [
            (*place, use.microbatch, use.state.value)
            for place, use in sorted(self._uses.items(), key=lambda item: item[0])
        ]
        raise SlotError(
            describe_misuse(
                label=self._label,
                call=(what, chunk, microbatch, slot),
                problem=problem,
                advice=advice,
                busy=busy,
                events=self._events,
                schedule=self._schedule,
                rank=self._rank,
            )
        )

"""Track the slots of one rank while a step runs.

A slot is free, holds a forward, is in its backward, and is free again. A split backward goes on to
wait for its weight half, and to run it. Any other order is refused, because a graph that is
replayed into a slot in use silently computes wrong results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from chunkgraph.errors import SlotError

_FORWARD = "forward done, waits for its backward"
_BACKWARD = "in backward"
_WAITING = "input gradient done, waits for its weight gradient"
_WEIGHT = "in weight gradient"

_BACKWARD_ONCE = (
    "run each backward once, in the step of its forward (retain_graph does not work with slots)"
)
_WEIGHT_ONCE = "run each weight gradient once, after the backward of its microbatch"
_NUM_SHOWN = 12


class _Use:
    """The microbatch that holds a slot."""

    __slots__ = ("microbatch", "state", "turn")

    def __init__(self, microbatch: int, turn: int) -> None:
        self.microbatch = microbatch
        self.turn = turn
        self.state = _FORWARD


class SlotMachine:
    """Assign and release the slots of one rank's model chunks.

    A step is ``begin_step``, then any legal order of ``acquire_forward``, ``begin_backward`` and
    ``release``, then ``end_step``, or ``abort_step`` after an exception. With a split backward,
    ``await_last`` and ``begin_last`` come before ``release``. Not thread-safe.

    Args:
        num_slots: Number of slots of each chunk.
        label: Owner of the slots, such as ``rank 1``, for messages.
        are_shared: Whether slot ``k`` is the same slot in every chunk, holding one microbatch of
            one of them; all counts must then be equal.

    Attributes:
        latest_turn: Unique number of the latest forward that acquired a slot.
    """

    def __init__(self, num_slots: Sequence[int], label: str, *, are_shared: bool = False) -> None:
        if not num_slots or min(num_slots) < 1:
            raise SlotError(f"{label}: every chunk needs at least one slot, got {list(num_slots)}")
        if are_shared and len(set(num_slots)) > 1:
            raise SlotError(f"{label}: shared slots, but counts {list(num_slots)}; pass equal ones")
        self._num_slots = tuple(num_slots)
        # The set that each chunk acquires its slots from.
        self._set_of = tuple(0 if are_shared else chunk for chunk in range(len(num_slots)))
        self._label = label
        self.latest_turn = 0
        self._events: list[tuple[str, int, int, int]] = []
        self.abort_step()

    def num_free(self, chunk: int) -> int:
        """Return the number of free slots of ``chunk``."""
        return self._free[self._set_of[chunk]].bit_count()

    def _next_free(self, chunk: int) -> int:
        """Return the lowest free slot of ``chunk``."""
        free = self._free[self._set_of[chunk]]
        return (free & -free).bit_length() - 1

    def begin_step(self) -> None:
        """Start a step; the one before has ended, or was aborted."""
        self._events.clear()
        self._num_forwards = [0] * len(self._num_slots)

    def acquire_forward(self, chunk: int) -> int:
        """Acquire the lowest free slot of a chunk for its next forward, and return its number.

        Raises:
            SlotError: No slot is free.
        """
        microbatch = self._num_forwards[chunk]
        if not self.num_free(chunk):
            owner = "the rank" if len(self._free) < len(self._set_of) else f"chunk {chunk}"
            raise self._error(
                f"forward chunk {chunk} microbatch {microbatch}",
                f"{owner} has no free slot; {self._num_slots[chunk]} in use",
                "plan the slots for the schedule that actually runs (chunkgraph plan), or check "
                "that every forward is followed by its backward",
            )
        slot = self._next_free(chunk)
        self._free[self._set_of[chunk]] ^= 1 << slot
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
            SlotError: The slot holds no finished forward, or that of another microbatch.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state is not _FORWARD or (turn is not None and turn != use.turn):
            self._refuse("backward", chunk, slot, _BACKWARD_ONCE)
        use.state = _BACKWARD
        self._events.append(("backward", chunk, use.microbatch, slot))

    def await_last(self, chunk: int, slot: int) -> None:
        """Mark that a slot's input gradient is done and its weight gradient is pending.

        Raises:
            SlotError: The slot is not in backward.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state is not _BACKWARD:
            self._refuse("defer weight", chunk, slot, _WEIGHT_ONCE)
        use.state = _WAITING
        self._waiting[chunk].append(slot)
        self._events.append(("input gradient", chunk, use.microbatch, slot))

    def waiting(self, chunk: int) -> tuple[int, ...]:
        """Return the turns of ``chunk`` that wait for their weight gradient, oldest first."""
        return tuple(self._uses[chunk, slot].turn for slot in self._waiting[chunk])

    def begin_last(self, chunk: int, turn: int | None = None) -> int:
        """Mark that the weight gradient that waits longest starts.

        Args:
            chunk: Index of the model chunk.
            turn: Turn of the forward whose weight gradient starts; None to accept any.

        Returns:
            The slot number.

        Raises:
            SlotError: No weight gradient waits, or another one has waited longer: the sums of
                weight gradients would have other bits.
        """
        turns = self.waiting(chunk)
        if turn in turns[1:]:
            first = self._uses[chunk, self._waiting[chunk][0]].microbatch
            raise self._error(
                f"weight chunk {chunk}",
                f"the weight gradient of microbatch {first} comes first, or the sums would have "
                "other bits",
                "run the weight gradients of a chunk in the order of its input gradients",
            )
        if not turns or turn not in (None, turns[0]):
            states = {use.turn: use.state for use in self._uses.values()}
            problem = "this microbatch's weight gradient has been run already"
            if turn is None:
                problem = "no microbatch waits for its weight gradient"
            elif states.get(turn) in (_FORWARD, _BACKWARD):
                problem = "the backward of this microbatch has not run"
            raise self._error(f"weight chunk {chunk}", problem, _WEIGHT_ONCE)
        slot = self._waiting[chunk].popleft()
        use = self._uses[chunk, slot]
        use.state = _WEIGHT
        self._events.append(("weight", chunk, use.microbatch, slot))
        return slot

    def release(self, chunk: int, slot: int) -> None:
        """Free a slot after its backward (after W if the backward is split).

        Raises:
            SlotError: The slot is not in backward.
        """
        use = self._uses.get((chunk, slot))
        if use is None or use.state not in (_BACKWARD, _WEIGHT):
            self._refuse("release", chunk, slot, _BACKWARD_ONCE)
        del self._uses[chunk, slot]
        self._free[self._set_of[chunk]] |= 1 << slot
        self._events.append(("release", chunk, use.microbatch, slot))

    def end_step(self) -> None:
        """End a step.

        Raises:
            SlotError: A slot is still in use.
        """
        waiting = [(c, s) for c, slots in enumerate(self._waiting) for s in slots]
        if waiting:
            names = ", ".join(
                f"microbatch {self._uses[place].microbatch} of chunk {place[0]}"
                for place in waiting
            )
            raise self._error(
                "end step",
                f"{len(waiting)} weight gradients were not run ({names})",
                "run the weight gradient of every microbatch before the step ends",
            )
        if self._uses:
            raise self._error(
                "end step",
                f"{len(self._uses)} slots are still in use",
                "run a backward for every forward before the step ends; for forward-only "
                "evaluation disable gradients, or use the eager model",
            )

    def abort_step(self) -> None:
        """Free all slots after an exception, in any state."""
        counts = [self._num_slots[of_set] for of_set in dict.fromkeys(self._set_of)]
        # Bit s of a set's number is set while its slot s is free.
        self._free = [(1 << count) - 1 for count in counts]
        self._uses: dict[tuple[int, int], _Use] = {}  # by chunk and slot, of slots in use
        self._num_forwards = [0] * len(self._num_slots)
        self._waiting = tuple(deque[int]() for _ in self._num_slots)

    def _refuse(self, what: str, chunk: int, slot: int, advice: str) -> NoReturn:
        """Refuse a call on a slot that does not hold what the call needs."""
        use = self._uses.get((chunk, slot))
        state = "holds no microbatch of this chunk" if use is None else use.state
        if use is not None and use.state is _FORWARD and what == "backward":
            state = "now holds another microbatch; this one's forward is gone"
        raise self._error(f"{what} chunk {chunk} slot {slot}", f"slot {slot}: {state}", advice)

    def _error(self, call: str, problem: str, advice: str) -> SlotError:
        """Return the error of a refused call, with the slots in use and the step so far."""
        lines = [f"{self._label}, {call}: {problem}.", f"What to do: {advice}."]
        lines.append("Slots in use:" if self._uses else "No slot is in use.")
        lines += [
            f"  chunk {chunk} slot {slot}: microbatch {use.microbatch}, {use.state}"
            for (chunk, slot), use in sorted(self._uses.items(), key=lambda item: item[0])
        ]
        lines.append("This step so far:")
        if (num_earlier := len(self._events) - _NUM_SHOWN) > 0:
            lines.append(f"     ... {num_earlier} earlier")
        lines += [
            f"     {name} chunk {chunk} microbatch {microbatch} slot {slot}"
            for name, chunk, microbatch, slot in self._events[-_NUM_SHOWN:]
        ]
        return SlotError("\n".join([*lines, f"  -> {call}"]))

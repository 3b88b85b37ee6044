"""Allocations of an eager pass, and the block that a pool needs to serve the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_ROUND_BYTES = 512
_STEP_BYTES = 2 << 20
_SMALL_BYTES = 1 << 20
"""Size up to which the CUDA allocator takes memory, and leaves a remainder, in other segments."""


@dataclass(frozen=True)
class Allocation:
    """One allocation.

    Attributes:
        num_bytes: Its size.
        begin: Number of the event that allocated it.
        end: Number of the event that freed it; None if it is in use.
    """

    num_bytes: int
    begin: int
    end: int | None


class AllocationLog:
    """The allocations of eager work on the capture stream since the log was entered.

    This one is of a backend that observes none.
    """

    def num_events(self) -> int:
        """Return the number of events so far."""
        return 0

    def allocations(self) -> Sequence[Allocation]:
        """Return the allocations so far."""
        return ()


def missing_bytes(
    num_bytes: int, allocations: Sequence[Sequence[Allocation]], free: Sequence[int]
) -> int:
    """Return the size of the block that a pool with these free blocks needs; see `Pool.reserve`."""
    if free and any(allocations):
        return max(block_bytes(own, free) for own in allocations)
    return num_bytes if num_bytes > max(free, default=0) else 0


def block_bytes(allocations: Iterable[Allocation], free: Sequence[int] = ()) -> int:
    """Return the size of one more block with which the CUDA allocator places these allocations.

    The allocator takes the smallest free piece, which may leave gaps, so this can exceed the most
    bytes in use at once. Every try simulates the allocator, so the search begins in larger steps.

    Args:
        allocations: The allocations.
        free: Sizes of the free blocks that the pool has; if they suffice, the result is 0.
    """
    events: list[tuple[int, int, int]] = []  # number, allocation, bytes; negative to free
    for i, allocation in enumerate(allocations):
        size = -(-allocation.num_bytes // _ROUND_BYTES) * _ROUND_BYTES
        if size > _SMALL_BYTES:
            events.append((allocation.begin, i, size))
            if allocation.end is not None:
                events.append((allocation.end, i, -size))
    events.sort()
    peak = max(accumulate(size for _, _, size in events), default=0)
    num_steps = max(1, max(peak // 64, sum(free) // 8) // _STEP_BYTES)
    size = max(0, -(-(peak - sum(free)) // _STEP_BYTES))
    too_small = size - 1
    while not _fits(events, [*free, size * _STEP_BYTES]):
        too_small, size = size, size + num_steps
    while size - too_small > 1:
        middle = (too_small + size) // 2
        if _fits(events, [*free, middle * _STEP_BYTES]):
            size = middle
        else:
            too_small = middle
    return size * _STEP_BYTES


def _fits(events: Iterable[tuple[int, int, int]], blocks: Sequence[int]) -> bool:
    """Return whether a best-fit allocator serves the events from blocks of these sizes."""
    free = {place << 60: size for place, size in enumerate(blocks)}  # start -> bytes
    used: dict[int, tuple[int, int]] = {}
    for _, i, size in events:
        if size < 0:
            start, length = used.pop(i)
            length += free.pop(start + length, 0)
            before = next((s for s, n in free.items() if s + n == start), None)
            if before is not None:
                start, length = before, length + free.pop(before)
            free[start] = length
            continue
        place = min(((n, s) for s, n in free.items() if n >= size), default=None)
        if place is None:
            return False
        length, start = place
        del free[start]
        if length - size > _SMALL_BYTES:
            free[start + size] = length - size
            length = size
        used[i] = start, length
    return True

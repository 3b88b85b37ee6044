"""The simulated caching allocator: disjoint blocks, reuse, merging, alignment."""

from __future__ import annotations

import queue
import sys
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.graphs.addresses import AddressRanges
from chunkgraph.graphs.recorder.simulated_pool import SimulatedPool


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), max_size=40))
def test_live_blocks_never_overlap_and_all_are_freed(
    plan: list[tuple[bool, int]],
) -> None:
    pool = SimulatedPool("pool")
    held: list[torch.UntypedStorage] = []
    for allocate, number in plan:
        if allocate or not held:
            held.append(pool.allocate(number))
        else:
            del held[number % len(held)]
        spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in held]
        assert sum(end - start for start, end in spans) == AddressRanges(spans).num_bytes
        assert (AddressRanges(spans) & pool.live()) == AddressRanges(spans)
        assert all(start % 512 == 0 for start, _ in spans)
    reserved = pool.reserved_bytes
    held.clear()
    assert not pool.live()
    # Merged again: everything that is reserved can be had in one piece per segment.
    for segment in pool.reserved():
        pool.allocate(min(segment.end - segment.start, 1 << 20))
    assert pool.reserved_bytes == reserved


def test_storages_may_die_in_other_threads() -> None:
    """As tensors that gloo's threads hold: they may die at any line of the pool's code."""
    pool = SimulatedPool("pool")
    others: queue.SimpleQueue[torch.UntypedStorage | None] = queue.SimpleQueue()

    def drop() -> None:
        while others.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    interval, held = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3000):
            storage = pool.allocate(1 + 37 * number % 5000)
            if number % 3:
                others.put(storage)
            else:
                held.append(storage)
            del storage
            del held[:-20]
    finally:
        sys.setswitchinterval(interval)
        others.put(None)
        thread.join()
    spans = AddressRanges((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in held)
    assert spans.num_bytes == sum(s.nbytes() for s in held)
    held.clear()
    assert not pool.live()
    assert sum(size for size, _ in pool._free) == pool.reserved_bytes


@given(*[st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=6)] * 2)
def test_address_ranges_behave_like_sets(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    def points(pairs: list[tuple[int, int]]) -> set[int]:
        return {p for start, end in pairs for p in range(start, end)}

    def members(ranges: AddressRanges) -> set[int]:
        return {p for r in ranges for p in range(r.start, r.end)}

    first, second = AddressRanges(a), AddressRanges(b)
    assert members(first & second) == points(a) & points(b)
    assert members(first | second) == points(a) | points(b)
    assert first.num_bytes == len(points(a))
    assert bool(first & second) == bool(points(a) & points(b))

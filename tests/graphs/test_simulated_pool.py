"""The simulated caching allocator: disjoint blocks, reuse, merging, alignment."""

from __future__ import annotations

import queue
import random
import sys
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkgraph.graphs import Allocation, CUDABackend, block_bytes
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


# One block serves the allocations of a pass.

MIB = 2**20


def test_a_block_has_the_peak_and_no_more_where_nothing_is_between() -> None:
    layers = [Allocation(4 * MIB, i, 20 - i) for i in range(10)]
    assert block_bytes(layers) == 40 * MIB
    one_after_the_other = [Allocation(4 * MIB, 2 * i, 2 * i + 1) for i in range(10)]
    assert block_bytes(one_after_the_other) == 4 * MIB
    assert block_bytes([]) == 0
    assert block_bytes([Allocation(MIB, 0, 1)]) == 0, "the allocator puts it elsewhere"


@pytest.mark.parametrize("gap", [2, 4, 8, 10, 14])
def test_a_block_is_larger_than_the_peak_by_the_gap_that_it_needs(gap: int) -> None:
    """Not by more, although a larger pass is tried in larger steps."""
    before = [Allocation(gap * MIB, 0, 2), Allocation(1000 * MIB, 1, None)]
    after = Allocation((gap + 2) * MIB, 3, None)  # too large for the hole
    assert block_bytes([*before, after]) == (gap + 1000 + gap + 2) * MIB


@pytest.mark.parametrize("free_bytes", [0, 20 * MIB])
@pytest.mark.parametrize("seed", range(10))
def test_a_pool_with_this_block_takes_no_other(seed: int, free_bytes: int) -> None:
    """The same allocations from a best-fit pool, in their order; other graphs may have made it."""
    order = random.Random(seed)
    live: list[tuple[int, int]] = []
    allocations: list[Allocation] = []
    for event in range(60):
        if live and order.random() < 0.45:
            size, begin = live.pop(order.randrange(len(live)))
            allocations.append(Allocation(size, begin, event))
        else:
            live.append((2 * MIB * order.randint(1, 12), event))
    allocations += [Allocation(size, begin, None) for size, begin in live]
    num_bytes = block_bytes(allocations)
    pool = SimulatedPool("block")
    pool.reserve(free_bytes)
    pool.reserve(num_bytes, [allocations])
    storages: dict[int, torch.UntypedStorage] = {}
    by_end = {a.end: a.begin for a in allocations}
    by_begin = {a.begin: a.num_bytes for a in allocations}
    for event in range(60):
        if event in by_end:
            del storages[by_end[event]]
        else:
            storages[event] = pool.allocate(by_begin[event])
    peak = sum(a.num_bytes for a in allocations if a.end is None)
    assert peak <= num_bytes
    more_bytes = block_bytes(allocations, [free_bytes])
    assert pool.reserved_bytes == free_bytes + more_bytes
    assert more_bytes < num_bytes if free_bytes else more_bytes == num_bytes


@pytest.mark.gpu
def test_a_pool_that_can_sleep_has_room_beside_its_first_segment() -> None:
    """The allocator serves only blocks of at most 1 MiB from that segment, which has 2 MiB."""
    pool = CUDABackend(can_sleep=True).new_pool("pool")
    pool.reserve(32 * MIB, [[Allocation(30 * MIB, 0, None), Allocation(2 * MIB, 1, None)]])
    reserved_bytes = pool.reserved_bytes
    held = pool.allocate(30 * MIB), pool.allocate(2 * MIB)
    assert pool.reserved_bytes == reserved_bytes
    del held


@pytest.mark.gpu
def test_allocations_on_the_capture_stream_are_observed() -> None:
    backend = CUDABackend()
    with backend.on_capture_stream(), backend.observe_allocations() as log:
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device=backend.device)
        assert log.num_events() > 0
        x = torch.empty(2 * MIB, dtype=torch.uint8, device=backend.device)
        del x
        sizes = [(a.num_bytes, a.end is None) for a in log.allocations()]
    assert sizes == [(2 * MIB, False), (4 * MIB, True)]
    del kept


@pytest.mark.gpu
def test_nothing_is_observed_while_the_user_records_history() -> None:
    backend = CUDABackend()
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        with backend.on_capture_stream(), backend.observe_allocations() as log:
            torch.empty(4 * MIB, dtype=torch.uint8, device=backend.device)
            assert list(log.allocations()) == []
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None)

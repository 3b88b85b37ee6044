"""One block serves the allocations of a pass."""

from __future__ import annotations

import random

import pytest
import torch

from chunkgraph.graphs import Allocation, CUDABackend, block_bytes
from chunkgraph.graphs.recorder.simulated_pool import SimulatedPool

MIB = 2**20


def test_a_block_has_the_peak_and_no_more_where_nothing_is_between() -> None:
    layers = [Allocation(4 * MIB, i, 20 - i) for i in range(10)]
    assert block_bytes(layers) == 40 * MIB
    one_after_the_other = [Allocation(4 * MIB, 2 * i, 2 * i + 1) for i in range(10)]
    assert block_bytes(one_after_the_other) == 4 * MIB
    assert block_bytes([]) == 0
    assert block_bytes([Allocation(MIB, 0, 1)]) == 0, "the allocator puts it elsewhere"


@pytest.mark.parametrize("seed", range(20))
def test_a_pool_with_this_block_takes_no_other(seed: int) -> None:
    """The same allocations from a best-fit pool, in their order."""
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
    pool.reserve(num_bytes)
    storages: dict[int, torch.UntypedStorage] = {}
    by_end = {a.end: a.begin for a in allocations}
    by_begin = {a.begin: a.num_bytes for a in allocations}
    for event in range(60):
        if event in by_end:
            del storages[by_end[event]]
        else:
            storages[event] = pool.allocate(by_begin[event])
    assert pool.reserved_bytes == num_bytes
    peak = sum(a.num_bytes for a in allocations if a.end is None)
    assert num_bytes >= peak


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

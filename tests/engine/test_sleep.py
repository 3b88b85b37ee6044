"""Graphs that sleep between steps train to the bits of eager training, and say what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from split_models import as_split, assert_equal, check_step, gradients, inputs_of, pair
from torch import nn
from toys import Apply, all_equal, counting, sample, towers, train, train_microbatch

from chunkgraph.engine import (
    CaptureOptions,
    ChunkGraphs,
    mark_constant,
)
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend
from chunkgraph.graphs.arena import check_environment
from chunkgraph.schedules import megatron_schedule


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    make = RecorderBackend if request.param == "recorder" else CUDABackend
    return make(can_sleep=True)


def nap(graphs: ChunkGraphs) -> None:
    """Sleep and wake; what the memory held is lost."""
    graphs.sleep()
    assert graphs.is_asleep
    graphs.wake()
    assert not graphs.is_asleep
    assert graphs._captured is not None
    for pool in graphs._captured.pools.pools:
        assert not pool.live(), "something keeps memory that does not survive"
        pool.poison()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("verify", ["none", "poison", "shadow"])
def test_pipelines_that_sleep_between_all_steps(
    make_pipeline: Callable[..., object], backend: GraphBackend, shared: bool, verify: str
) -> None:
    counts = [2, 4, 2, 6]
    schedules = [megatron_schedule(2, 2, count, 2) for count in counts]
    eager, graphed = make_pipeline(2, 2), make_pipeline(2, 2)
    slots = [(5, 5), (5, 5)]
    graphed.attach(slots, backend, shared_slots=shared, verify=verify)
    for number, schedule in enumerate(schedules):
        assert graphed.train([schedule], number).equals(eager.train([schedule], number))
        for graphs in graphed.graphs:
            if number:
                nap(graphs)
    for graphs in graphed.graphs:
        assert graphs.counters.fallbacks == {"capture warmup": 1}
        assert graphs.counters.capture_sessions == 1


@pytest.mark.parametrize("name", ["layers", "checkpoint", "frozen", "own"])
def test_split_backwards_that_sleep_between_all_steps(backend: GraphBackend, name: str) -> None:
    eager, module = pair(name, backend.device)
    graphs = as_split(module, backend)
    for number, lag in enumerate((0, 2, 1, 0)):
        check_step(graphs, eager, inputs_of(backend.device, 5), lag)
        assert_equal(gradients(module), gradients(eager))
        if number:
            nap(graphs)


def test_constant_inputs_are_loaded_again(backend: GraphBackend) -> None:
    module = Apply(lambda self, x, mask: self.linear(x) * mask, linear=nn.Linear(8, 8))
    module.to(backend.device)
    graphs = ChunkGraphs(module, 2, backend=backend)
    mask = mark_constant(torch.rand(8, device=backend.device))
    for number in range(4):
        x = sample(backend)
        with graphs.step(1):
            result = train_microbatch(graphs.callables[0], x, mask=mask)
        assert torch.equal(result, module(x, mask).detach())
        if number:
            nap(graphs)


@pytest.fixture
def graphs() -> ChunkGraphs:
    backend = RecorderBackend(can_sleep=True)
    made = ChunkGraphs(towers(backend, False), 1, backend=backend)
    made.capture([sample(backend)])
    return made


@pytest.fixture
def x(graphs: ChunkGraphs) -> torch.Tensor:
    return sample(RecorderBackend())


def test_a_call_while_asleep_says_what_to_do(graphs: ChunkGraphs, x: torch.Tensor) -> None:
    graphs.sleep()
    for arguments in ({}, {"eager": True}, {"forward_only": True}):
        with (
            counting(graphs.counters, replays=0),
            pytest.raises(SlotError, match=r"step began while.*sleep. Call wake\(\)"),
            graphs.step(1, **arguments),
        ):
            pass
    with pytest.raises(SlotError, match="outside a step"):
        graphs.callables[0](x)
    with torch.no_grad():
        assert graphs.callables[0](x).isfinite().all()  # evaluates eagerly
    graphs.wake()
    with counting(graphs.counters, replays=1):
        train(graphs, x)


def test_sleep_without_graphs_does_nothing(x: torch.Tensor) -> None:
    backend = RecorderBackend(can_sleep=True)
    graphs = ChunkGraphs(towers(backend, False), 1, backend=backend)
    for _ in range(3):
        train(graphs, x)
        is_captured = graphs.report is not None
        graphs.sleep()
        assert graphs.is_asleep is is_captured
        graphs.wake()
    assert graphs.counters.replays == 2


def test_memory_that_cannot_be_given_back(x: torch.Tensor) -> None:
    module = towers(RecorderBackend(), False)
    graphs = ChunkGraphs(module, 1)
    with pytest.raises(ConfigError, match=r"needs CaptureOptions\(can_sleep=True\)"):
        graphs.sleep()
    graphs = ChunkGraphs(module, 1, options=CaptureOptions(can_sleep=True))
    graphs.capture([x])
    nap(graphs)
    train(graphs, x)


def test_release_while_asleep(graphs: ChunkGraphs, x: torch.Tensor) -> None:
    graphs.sleep()
    graphs.release()
    assert not graphs.is_asleep
    train(graphs, x)
    with counting(graphs.counters, capture_sessions=1, replays=1):
        train(graphs, x)


def test_a_failed_wake_can_be_repeated(x: torch.Tensor) -> None:
    backend = RecorderBackend(limit_bytes=24 << 20, can_sleep=True)
    eager, mine = (towers(backend, False)[0] for _ in range(2))
    graphs = ChunkGraphs(mine, 2, backend=backend)
    graphs.capture([x])
    needed = sum(p.reserved_bytes for p in graphs._captured.pools.every)
    awake = backend.free_bytes()
    graphs.sleep()
    assert backend.free_bytes() == awake + needed
    other = backend.new_pool("other")
    other.reserve(backend.free_bytes() - needed + 1)
    for _ in range(2):
        message = rf"needs {needed >> 20} MiB, but only {(needed >> 20) - 1} MiB of cpu are free"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            graphs.wake()
        assert graphs.is_asleep
        assert backend.free_bytes() == needed - (1 << 20)
    del other
    graphs.wake()
    torch.manual_seed(1)
    expected = train_microbatch(eager, x)
    torch.manual_seed(1)
    with graphs.step(1):
        assert torch.equal(train_microbatch(graphs.callables[0], x), expected)
    assert all_equal([p.grad for p in mine.parameters()], [p.grad for p in eager.parameters()])


def test_nccl_must_not_register_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks would go on using it; without them only the allocator's hook matters."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    check_environment()
    monkeypatch.setenv(hook, "1")
    with pytest.raises(ConfigError, match=f"Unset on every rank: {hook}"):
        check_environment()
    monkeypatch.delenv(hook)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(ConfigError, match="set to 0 on every rank: NCCL_GRAPH_REGISTER"):
            check_environment()
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
        check_environment()
    finally:
        torch.distributed.destroy_process_group()

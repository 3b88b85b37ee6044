"""Two models whose steps never overlap have the same memory; the oracle is eager training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from toys import Tower, all_equal, sample

from chunkgraph.engine import CaptureOptions, ChunkGraphs
from chunkgraph.errors import ConfigError, SlotError
from chunkgraph.graphs import CUDABackend, GraphBackend, RecorderBackend

NUM_SLOTS = 3


@pytest.fixture(params=["recorder", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> GraphBackend:
    make = RecorderBackend if request.param == "recorder" else CUDABackend
    return make(can_sleep=True)


def pair(backend: GraphBackend, *, shares: bool = True, **options: str) -> list[ChunkGraphs]:
    """Return the graphs of a policy and of another model."""
    torch.manual_seed(3)
    models = [torch.nn.Sequential(*(Tower() for _ in range(n))).to(backend.device) for n in (3, 2)]
    own = CaptureOptions(**options)
    policy = ChunkGraphs(models[0], NUM_SLOTS, backend=backend, options=own)
    others = {"shares_memory_with": policy} if shares else {"backend": backend}
    return [policy, ChunkGraphs(models[1], NUM_SLOTS, options=own, **others)]


def cycles(
    pair: Sequence[ChunkGraphs], *, eager: bool = False, trains: bool = True, sleeps: bool = False
) -> list[torch.Tensor]:
    """Run cycles of both models; return results and gradients.

    Args:
        pair: their graphs.
        eager: whether all steps are.
        trains: whether the second model trains too.
        sleeps: whether the memory sleeps after each step.
    """
    torch.manual_seed(5)
    results: list[torch.Tensor] = []
    for count in (2, 3, 1, 3, 2):
        for graphs, is_training in zip(
            (pair[0], pair[1], pair[0]), (False, trains, True), strict=True
        ):
            with (
                torch.set_grad_enabled(is_training),
                graphs.step(count, forward_only=not is_training, eager=eager),
            ):
                xs = [sample(graphs.backend, rows=64) for _ in range(count)]
                ys = [graphs.callables[0](x) for x in xs]
                results += [y.detach().clone() for y in ys]
                for y in ys if is_training else ():
                    y.square().sum().backward()
            if sleeps:
                pair[1].sleep()
                assert pair[0].is_asleep is pair[1].is_asleep
                pair[0].wake()
    parameters = [p for graphs in pair for p in graphs.chunks[0].parameters]
    return results + [p.grad for p in parameters if p.grad is not None]


def held(pair: Sequence[ChunkGraphs]) -> tuple[int, int]:
    """Return the bytes of slots and scratch, and the number of their pools."""
    pools = {id(p): p for graphs in pair for s in graphs.sets() for p in s.pools.pools}
    return sum(pool.reserved_bytes for pool in pools.values()), len(pools)


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_two_models_on_one_memory_equal_eager(
    backend: GraphBackend, trains: bool, sleeps: bool
) -> None:
    expected = cycles(pair(backend), eager=True, trains=trains)
    sharing, apart = pair(backend), pair(backend, shares=False)
    assert all_equal(cycles(sharing, trains=trains, sleeps=sleeps), expected)
    assert all_equal(cycles(apart, trains=trains), expected)
    for graphs in sharing:
        trained = graphs is sharing[0] or trains
        assert graphs.counters.replays == (9 if trained else 0)
    policy = held(apart[:1])
    assert held(sharing) == policy  # the second model takes nothing
    assert held(apart)[0] > policy[0]
    # A released model leaves the memory to the other one.
    sharing[0].release()
    assert not sharing[0].is_asleep
    assert held(sharing)[1] == (NUM_SLOTS + 1 if trains else 1)
    cycles(sharing, trains=trains)
    assert held(sharing)[1] == NUM_SLOTS + 1


def test_a_capture_again_takes_the_memory_of_the_other(backend: GraphBackend) -> None:
    def moved_between(graphs: list[ChunkGraphs], *, eager: bool) -> list[torch.Tensor]:
        first = cycles(graphs, eager=eager)
        held_before = held(graphs)
        for p in (p for each in graphs for p in each.chunks[0].parameters):
            p.data = p.data.clone()
        results = [*first, *cycles(graphs, eager=eager)]
        assert held(graphs) == held_before
        return results

    expected = moved_between(pair(backend), eager=True)
    graphs = pair(backend, on_moved_memory="recapture")
    assert all_equal(moved_between(graphs, eager=False), expected)
    assert all(len(each.counters.recaptures) == 1 for each in graphs)


def test_steps_of_models_that_share_memory_never_overlap(backend: GraphBackend) -> None:
    policy, other = pair(backend)
    cycles((policy, other))
    x = sample(backend, rows=64)
    with policy.step(1):
        y = policy.callables[0](x)
        for forward_only in (False, True):
            with (
                pytest.raises(SlotError, match=r"step began inside a step of .*chunk 0"),
                other.step(1, forward_only=forward_only),
            ):
                pass
        with pytest.raises(SlotError, match=r"sleep\(\) was called inside a step"):
            other.sleep()
        with pytest.raises(SlotError, match=r"capture\(\) was called inside a step"):
            other.capture([x])
        y.square().sum().backward()
    other.sleep()
    with pytest.raises(SlotError, match=r"Call wake\(\)"), policy.step(1):
        pass
    other.wake()
    cycles((policy, other))


@pytest.mark.parametrize("forward_only", [False, True])
def test_no_capture_takes_memory_that_sleeps(backend: GraphBackend, forward_only: bool) -> None:
    policy, other = pair(backend)
    x = sample(backend, rows=64)
    for _ in range(2):
        with torch.set_grad_enabled(not forward_only), policy.step(1, forward_only=forward_only):
            y = policy.callables[0](x)
            if not forward_only:
                y.square().sum().backward()
    policy.sleep()
    for graphs in (other, *([policy] if forward_only else [])):
        with pytest.raises(SlotError, match=r"capture\(\) was called while graphs sleep"):
            graphs.capture([x])
    policy.wake()
    other.capture([x])


def test_paged_slots_share_no_memory() -> None:
    policy, _ = pair(RecorderBackend())
    options: Any = {"options": CaptureOptions(max_slots=1), "schedule": object()}
    with pytest.raises(ConfigError, match="shares_memory_with cannot be combined with paged"):
        ChunkGraphs(Tower(), 1, shares_memory_with=policy, **options)

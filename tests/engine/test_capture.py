"""Capture sessions change no state, leave a working model if they fail, and can be repeated."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from thread_ranks import Agreeing, run_ranks
from torch import nn
from toys import (
    SYNC_LINE,
    Apply,
    Tower,
    all_equal,
    sample,
    towers,
    train,
    train_microbatch,
)

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs, StepMode
from chunkgraph.engine.capture import session
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import GraphBackend, RecorderBackend


def train_steps(graphs: ChunkGraphs, backend: GraphBackend, num_steps: int) -> None:
    for _ in range(num_steps):
        with graphs.step(1) as mode:
            assert mode is StepMode.EAGER
            train_microbatch(graphs.callables[0], sample(backend))


def random_states(backend: GraphBackend) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if backend.device.type == "cuda":
        states.append(torch.cuda.get_rng_state())
    return states


def test_a_session_changes_no_gradient_buffer_or_random_state(backend: GraphBackend) -> None:
    modules = towers(backend, False, False)
    x = sample(backend)
    for module in modules:
        train_microbatch(module, x)
    grads = [p.grad.clone() for m in modules for p in m.parameters()]
    calls = [m.num_calls.item() for m in modules]
    states = random_states(backend)
    graphs = ChunkGraphs(modules, [3, 2], backend=backend)
    report = graphs.capture([(x,), (x,)])
    assert report.num_graphs == 10
    assert report.num_slots == (3, 2)
    assert all_equal(states, random_states(backend))
    assert calls == [m.num_calls.item() for m in modules]
    assert all_equal(grads, [p.grad for m in modules for p in m.parameters()])
    # Existing gradients stay and are added to, as by autograd.
    train(graphs, x)
    assert not torch.equal(modules[0].linear.weight.grad, grads[0])
    assert modules[0].num_calls.item() == calls[0] + 1


def test_a_session_that_fails_half_way_leaves_a_working_eager_model(backend: GraphBackend) -> None:
    modules = towers(backend, False, True)
    x = sample(backend)
    expected = [train_microbatch(m, x) for m in towers(backend, False, True)]
    states = random_states(backend)
    graphs = ChunkGraphs(modules, [2, 2], backend=backend)
    with pytest.raises(CaptureError) as error:
        graphs.capture([(x,), (x,)])
    message = str(error.value)
    assert re.search(SYNC_LINE, message)
    assert "chunk 1 slot 0" in message
    assert graphs.counters.captures == 0
    assert graphs.report is None
    assert all_equal(states, random_states(backend))
    torch.manual_seed(4)
    [nn.Linear(8, 8) for _ in range(2)]  # the draws that `towers` makes before `expected`
    with graphs.step(1) as mode:
        assert mode is StepMode.EAGER
        outputs = [train_microbatch(call, x) for call in graphs.callables]
    assert all_equal(outputs, expected)
    assert dict(graphs.counters.fallbacks) == {"capture failed": 1}
    modules[1].syncs = False  # repaired: capturing works now
    graphs.capture([(x,), (x,)])
    with graphs.step(1) as mode:
        assert mode is StepMode.REPLAY
        train_microbatch(graphs.callables[1], x)


def test_on_failure_eager_warns_once_and_trains_on() -> None:
    backend = RecorderBackend()
    graphs = ChunkGraphs(
        towers(backend, True), [2], backend=backend, options=CaptureOptions(on_failure="eager")
    )
    train(graphs, sample(backend))
    with pytest.warns(UserWarning, match=rf"(?s){SYNC_LINE}.*eagerly") as records:
        train_steps(graphs, backend, num_steps=3)
    assert len(records) == 1
    assert dict(graphs.counters.fallbacks) == {"capture warmup": 1, "capture failed": 3}


def test_workspaces_and_the_cache_are_freed_after_every_step_before_the_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise an optimizer would allocate around what only the step needed."""
    backend = RecorderBackend()
    modes: list[StepMode] = []
    graphs = ChunkGraphs(
        towers(backend, False), [1], backend=backend, options=CaptureOptions(num_warmup_steps=2)
    )
    monkeypatch.setattr(backend, "release_workspaces", lambda: modes.append(graphs.mode))
    for count in (1, 2):
        train_steps(graphs, backend, 1)
        assert modes == [StepMode.OUTSIDE] * count
    for _ in range(2):
        with graphs.step(1):
            modes.clear()
            train_microbatch(graphs.callables[0], sample(backend))
        assert modes == []
    with graphs.step(1, eager=True):
        train_microbatch(graphs.callables[0], sample(backend))
    assert modes == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("failing", [None, 0, 1])
def test_all_ranks_take_every_decision_alike(failing: int | None) -> None:
    together = Agreeing(2)
    modes: list[list[StepMode]] = [[], []]
    errors: list[str] = ["", ""]
    fallbacks: list[dict[str, int]] = [{}, {}]

    def rank_main(rank: int) -> None:
        backend = RecorderBackend()
        module = Tower(syncs=rank == failing)
        module.dropout.p = 0.0
        graphs = ChunkGraphs(
            [Chunk.from_module(module, f"rank {rank} chunk 0")],
            [2],
            backend=backend,
            agree=together.rank(rank),
            options=CaptureOptions(num_warmup_steps=1 + rank),  # rank 1 is ready a step later
        )
        for wants_eager in (False, False, False, rank == 1, False):
            try:
                with graphs.step(1, eager=wants_eager) as mode:
                    modes[rank].append(mode)
                    train_microbatch(graphs.callables[0], sample(backend))
            except CaptureError as error:
                errors[rank] = str(error)
        fallbacks[rank] = dict(graphs.counters.fallbacks)

    run_ranks(2, rank_main)
    eager, replay = StepMode.EAGER, StepMode.REPLAY
    assert modes[0] == modes[1]
    assert fallbacks[0] == fallbacks[1]
    if failing is None:
        assert modes[0] == [eager, eager, replay, eager, replay]
        assert fallbacks[0] == {"capture warmup": 2, "requested": 1}
    else:
        assert modes[0] == [eager] * 4  # the step whose capture failed raised on both ranks
        assert re.search(SYNC_LINE, errors[failing])
        assert "another rank" in errors[1 - failing]
        assert fallbacks[0] == {"capture warmup": 2, "capture failed": 2}


@pytest.mark.usefixtures("no_collector")
def test_all_ranks_repeat_a_test_replay_that_differs_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A graph may hold collectives, which wait for the replay of the other rank."""
    together = Agreeing(2)
    modules = [Tower(), Tower()]
    num_replays = {0: 0, 1: 0}

    def differs(chunk: Chunk, _passes: object, replays: Sequence[object], _noise: object) -> Any:
        rank = modules.index(chunk.module)
        num_replays[rank] = len(replays)
        return ("a bit differs", "layer") if rank == 1 and len(replays) < 3 else ("", "")

    def rank_main(rank: int) -> None:
        graphs = ChunkGraphs(
            [modules[rank]], [1 + rank], backend=RecorderBackend(), agree=together.rank(rank)
        )
        graphs.capture([sample(RecorderBackend())])

    monkeypatch.setattr(session, "difference", differs)
    run_ranks(2, rank_main)
    assert num_replays == {0: 3, 1: 3}


def test_any_exception_in_the_session_reaches_all_ranks() -> None:
    """A warmup pass or an internal bug may raise anything; the other ranks must learn of it."""
    agreed: list[Sequence[int]] = []

    def agree(values: Sequence[int]) -> list[int]:
        agreed.append(list(values))
        return list(values)

    def fail(*_: Any) -> None:
        raise KeyError("gone")

    backend = RecorderBackend()
    module = Apply(fail, linear=nn.Linear(8, 8))
    graphs = ChunkGraphs([module], [1], backend=backend, agree=agree)
    with pytest.raises(CaptureError, match=r"KeyError: 'gone'\n.*test_capture\.py"):
        graphs.capture([(sample(backend),)])
    assert [1, 0, 0] in [values[:3] for values in agreed]  # it failed
    assert next(values for values in agreed if len(values) == 1)[0] > 0  # the cause


def test_too_little_memory_is_reported_before_anything_is_captured() -> None:
    class Small(RecorderBackend):
        """Reports 2 MiB held by every forward, and free memory for three."""

        def __init__(self) -> None:
            super().__init__()
            self.num_calls = 0

        def allocated_bytes(self) -> int:
            self.num_calls += 1
            # Before a pass, after its forward, and after everything is freed.
            return (0, 2**21, 0)[(self.num_calls - 1) % 3]

        def free_bytes(self) -> int | None:
            return 2**20 * 3

    backend = Small()
    graphs = ChunkGraphs(towers(backend, False), [2], backend=backend)
    with pytest.raises(CaptureError, match=r"need 4 MiB \(chunk 0: 2 slots of 2 MiB\).*only 3 MiB"):
        graphs.capture([(sample(backend),)])
    assert all(pool.reserved_bytes == 0 for pool in backend._pools)
    ChunkGraphs(towers(backend, False), [1], backend=backend).capture([(sample(backend),)])


def test_training_that_never_captures_warns_once_with_the_cause() -> None:
    def train(num_steps: int, shape_of: Callable[[int], int], *, is_detached: bool = False) -> None:
        graphs = ChunkGraphs(nn.Linear(8, 8), 1, backend=RecorderBackend())
        for number in range(num_steps):
            rows = shape_of(number)
            with graphs.step(1, shape_key=rows):
                y = graphs.callables[0](torch.randn(rows, 8, requires_grad=True))
                (y.detach().requires_grad_() if is_detached else y).sum().backward()

    with pytest.warns(UserWarning, match="11 steps ran eagerly.*shapes of steps changed 10") as two:
        train(40, lambda number: 4 + number % 2)
    assert len(two) == 1
    with pytest.warns(UserWarning, match="no backward of chunk 0 ran in a step") as one:
        train(40, lambda _: 4, is_detached=True)
    assert len(one) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(40, lambda number: 4 + (number % 4 == 3))
        train(10, lambda number: 4 + number % 2)


@pytest.mark.parametrize("verify", ["none", "shadow", "poison"])
def test_captures_and_replays_ignore_the_default_device(backend: GraphBackend, verify: Any) -> None:
    """Like ``torch.set_default_device``: a tensor of ours without a device would land there."""
    modules = towers(backend, False, False)
    x = sample(backend)
    for module in modules:
        train_microbatch(module, x)
    options = CaptureOptions(verify=verify)
    with torch.device("meta"):
        graphs = ChunkGraphs(modules, [2, 1], backend=backend, options=options)
        for _ in range(4):
            with graphs.step(2) as mode:
                for call in graphs.callables:
                    for _ in range(2):
                        train_microbatch(call, x)
    assert mode is StepMode.REPLAY

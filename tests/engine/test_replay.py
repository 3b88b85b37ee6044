"""Replays: refusals, returned tensors, and evaluation around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from toys import Apply, capture, counting, sample, towers, train, train_microbatch

from chunkgraph.engine import Chunk, ChunkGraphs, StepMode
from chunkgraph.errors import ReplayMismatchError, SlotError
from chunkgraph.graphs import GraphBackend, RecorderBackend


@pytest.fixture
def graphs(backend: GraphBackend) -> ChunkGraphs:
    """Make captured graphs of one slot."""
    graphs = ChunkGraphs(towers(backend, False), [1], backend=backend)
    graphs.capture([sample(backend)])
    return graphs


def backward_twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("call", "difference"),
    [
        (
            lambda c, x: c(x[:2]),
            r"argument 0: captured \(4, 8\) torch.float32 on \S+ .*, called \(2, 8\)",
        ),
        (
            lambda c, x: c(x.double()),
            r"called \(4, 8\) torch.float64",
        ),
        (lambda c, x: c(x, scale=2.0), "argument 'scale': captured nothing, called 2.0"),
    ],
)
def test_changed_arguments_are_refused_with_their_difference(
    backend: GraphBackend, call: Callable[..., Any], difference: str
) -> None:
    graphs = ChunkGraphs(towers(backend, False), [2], backend=backend)
    x = sample(backend)
    graphs.capture([(x,)])
    with pytest.raises(ReplayMismatchError, match=difference), graphs.step(1):
        call(graphs.callables[0], x)
    with graphs.step(1):  # the failed step left no slot in use
        train_microbatch(graphs.callables[0], x)


def test_a_gradient_that_was_not_captured_is_refused(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(towers(backend, False), [1], backend=backend)
    graphs.capture([(sample(backend).detach(),)])
    train(graphs, sample(backend).detach())
    with (
        pytest.raises(ReplayMismatchError, match=r"called .* \(requires grad\)"),
        graphs.step(1),
    ):
        graphs.callables[0](sample(backend))


def test_an_announced_change_of_shape_runs_the_whole_step_eagerly(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(towers(backend, False), [2], backend=backend)
    for rows, mode in (
        (4, StepMode.EAGER),
        (4, StepMode.REPLAY),
        (6, StepMode.EAGER),
        (4, StepMode.REPLAY),
    ):
        with graphs.step(1, shape_key=rows) as now:
            train_microbatch(graphs.callables[0], sample(backend, rows))
        assert now is mode
    assert dict(graphs.counters.fallbacks) == {"capture warmup": 1, "input shapes differ": 1}


def test_samples_are_captured_for_one_shape_key(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(towers(backend, False), [2], backend=backend)
    graphs.capture([(sample(backend, 4),)], shape_key=4)
    for rows, mode in (4, StepMode.REPLAY), (6, StepMode.EAGER):
        with graphs.step(1, shape_key=rows) as now:
            train_microbatch(graphs.callables[0], sample(backend, rows))
        assert now is mode


def test_misuse_of_slots_and_steps(backend: GraphBackend) -> None:
    graphs = ChunkGraphs(towers(backend, False), [2], backend=backend)
    x = sample(backend)
    graphs.capture([(x,)])
    call = graphs.callables[0]
    with pytest.raises(SlotError, match="outside a step"):
        call(x)
    with pytest.raises(SlotError, match="slots"), graphs.step(3):
        [call(x) for _ in range(3)]
    with pytest.raises(SlotError, match="still in use"), graphs.step(1):
        call(x)
    with pytest.raises(SlotError, match="inside a step"), graphs.step(1), graphs.step(1):
        pass
    with pytest.raises(SlotError, match="run each backward once"), graphs.step(1):
        backward_twice(call(x).sum())
    with torch.no_grad():
        assert call(x).isfinite().all()  # evaluation needs no step
    with graphs.step(2):
        train_microbatch(call, x)


def test_input_gradients_are_copies_that_later_replays_do_not_touch(
    graphs: ChunkGraphs, backend: GraphBackend
) -> None:
    x = sample(backend)
    with graphs.step(2):
        train_microbatch(graphs.callables[0], x)
        kept, x.grad = x.grad, None
        before = kept.clone()
        train_microbatch(graphs.callables[0], sample(backend))
    assert torch.equal(kept, before)


def test_hooks_run_before_replays() -> None:
    backend = RecorderBackend()
    (module,) = towers(backend, False)
    seen: list[str] = []
    chunk = dataclasses.replace(
        Chunk.from_module(module, "it"), before_forward=lambda: seen.append("before")
    )
    graphs = ChunkGraphs([chunk], [1], backend=backend)
    train(graphs, sample(backend))
    assert seen == []
    train(graphs, sample(backend), sample(backend))
    assert seen == ["before"] * 2


def test_markers_follow_every_gradient_and_every_replay(backend: GraphBackend) -> None:
    markers: list[mock.Mock] = []

    def new_marker() -> mock.Mock:
        markers.append(mock.Mock())
        return markers[-1]

    (module,) = towers(backend, False)
    chunk = dataclasses.replace(Chunk.from_module(module, "rank 0 chunk 0"), new_marker=new_marker)
    graphs = capture(chunk, sample(backend), num_slots=2, backend=backend)
    train(graphs, sample(backend), sample(backend))
    seen = [sorted(call.args[0] for call in m.accumulated.call_args_list) for m in markers]
    assert seen == [[0, 1]] * 2
    # The lowest free slot serves both.
    assert [m.replayed.call_count for m in markers] == [2, 0]


def test_a_step_whose_calls_want_no_gradient_is_counted_as_eager(
    graphs: ChunkGraphs, backend: GraphBackend
) -> None:
    expected = counting(graphs.counters, replays=0, replayed_steps=0)
    with expected, graphs.step(1), torch.no_grad():
        graphs.callables[0](sample(backend))
    assert dict(graphs.counters.fallbacks) == {"nothing replayed": 1}
    with counting(graphs.counters, replays=1, replayed_steps=1), graphs.step(1):
        train_microbatch(graphs.callables[0], sample(backend))
    assert graphs.counters.fallbacks.total() == 1


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_result_outlives_its_slot_where_it_is_copied(
    backend: GraphBackend, *, is_copied: bool
) -> None:
    calls: list[Any] = []

    def copies_outputs(*args: Any, **kwargs: Any) -> bool:
        calls.append((args[0].shape, kwargs))
        return is_copied

    (module,) = towers(backend, False)
    module.dropout.p = 0.0
    chunk = dataclasses.replace(Chunk.from_module(module, "it"), copies_outputs=copies_outputs)
    graphs = capture(chunk, sample(backend), 2.0, backend=backend)
    assert calls == [((4, 8), {})]
    kept, x = [], sample(backend)
    with graphs.step(2):
        for factor in (1.0, 3.0):
            kept.append(graphs.callables[0](x * factor, 2.0))
            kept[-1].sum().backward()
    expected = module(x, 2.0) if is_copied else module(x * 3.0, 2.0)
    assert torch.equal(kept[0], expected)
    assert torch.equal(kept[1], module(x * 3.0, 2.0))
    assert (kept[0].data_ptr() == kept[1].data_ptr()) is not is_copied


def test_a_gradient_is_not_differentiated_again(graphs: ChunkGraphs, backend: GraphBackend) -> None:
    x = sample(backend)
    with pytest.raises(ReplayMismatchError, match="create_graph"), graphs.step(1):
        graphs.callables[0](x).square().sum().backward(create_graph=True)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_backward_runs_whether_the_input_takes_a_gradient_or_not(
    backend: GraphBackend, *, requires_grad: bool
) -> None:
    """The captured input takes one."""
    (module,) = towers(backend, False)
    graphs = capture(module, sample(backend), backend=backend)
    x = sample(backend).detach().requires_grad_(requires_grad)
    train(graphs, x)
    assert graphs.counters.backward_replays == 1
    assert module.linear.weight.grad.any()
    assert (x.grad is not None) is requires_grad


def test_keyword_arguments_may_come_in_any_order(backend: GraphBackend) -> None:
    (module,) = towers(backend, False)
    module.dropout.p = 0.0
    graphs = ChunkGraphs([module], [1], backend=backend)
    x = sample(backend)
    graphs.capture([{"x": x, "scale": 2.0}])
    with graphs.step(1):
        y = graphs.callables[0](scale=2.0, x=x)
        assert torch.equal(y, module(x, 2.0))
        y.sum().backward()


@pytest.mark.parametrize("aborts", [False, True])
def test_a_backward_is_not_run_on_another_microbatch(
    graphs: ChunkGraphs, backend: GraphBackend, aborts: bool
) -> None:
    """Neither a second one in its step, nor the first one in the step after its own."""

    def forward() -> torch.Tensor:
        return graphs.callables[0](sample(backend)).sum()

    first: list[torch.Tensor] = []

    def run() -> None:
        if aborts:
            with pytest.raises(KeyError), graphs.step(1):
                raise KeyError(first.append(forward()))
        with graphs.step(2):
            if not aborts:
                first.append(forward())
                first[0].backward(retain_graph=True)
            forward()
            first[0].backward()

    with pytest.raises(SlotError, match="now holds another microbatch"):
        run()
    train(graphs, sample(backend))  # nothing is left over


def test_the_gradient_of_a_first_output_is_received_into_a_slot(backend: GraphBackend) -> None:
    def two(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = module.layer(x)
        return y.relu(), y.tanh()

    module = Apply(two, layer=torch.nn.Linear(8, 8))
    graphs = ChunkGraphs(module.to(backend.device), 2, backend=backend)
    x = torch.randn(4, 8, device=backend.device)
    graphs.capture([x])
    slots = graphs._captured.slots[0]
    with graphs.step(2):
        outputs = [graphs.callables[0](x) for _ in range(2)]
        for slot, ys in zip(slots, outputs, strict=True):
            received = graphs.reserve_output_grad(0)
            assert received.data_ptr() == slot.output_grads.tensors[0].data_ptr()
            torch.autograd.backward(ys, [received.fill_(1), torch.ones_like(ys[1])])

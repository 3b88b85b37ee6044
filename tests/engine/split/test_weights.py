"""Weight halves: when they may run, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from split_models import (
    WIDTH,
    Block,
    as_split,
    assert_equal,
    gradients,
    inputs_of,
    run_eagerly,
    run_split,
    unseen,
)
from torch import nn
from toys import Apply, copy_with_gradient

from chunkgraph.engine import Chunk, ChunkGraphs, ReplayRanges
from chunkgraph.engine.split import SPLIT, WeightBackwards
from chunkgraph.errors import CaptureError, ReplayMismatchError, SlotError
from chunkgraph.graphs import RecorderBackend


@pytest.fixture
def x() -> torch.Tensor:
    return inputs_of(torch.device("cpu"), 1)[0]


def backward(graphs: ChunkGraphs, x: torch.Tensor, c: int = 0) -> None:
    graphs.callables[c](x.detach().requires_grad_()).square().sum().backward()


def warmed(x: torch.Tensor, *, replays: bool = True, num_slots: int = 3) -> ChunkGraphs:
    """Make graphs of a block, whose next step replays or is eager."""
    graphs: ChunkGraphs = as_split(Block(), RecorderBackend(), num_slots)
    if replays:
        graphs.capture([x])
    return graphs


def step(graphs: ChunkGraphs, *actions: Callable[[], object]) -> None:
    with graphs.step(len(actions)):
        for action in actions:
            action()


both_modes = pytest.mark.parametrize("replays", [True, False], ids=["replay", "eager"])


@both_modes
def test_weights_run_in_the_order_of_the_input_gradients(x: torch.Tensor, replays: bool) -> None:
    graphs = warmed(x, replays=replays)
    half = partial(backward, graphs, x)
    pending: list[int] = []
    runners: list[Callable[[], None]] = []
    with pytest.raises(SlotError, match="microbatch 0 comes first"):
        step(
            graphs,
            half,
            half,
            lambda: pending.append(len(graphs.weights._waiting(0))),
            lambda: runners.append(graphs.weights.runner(0)),
            lambda: runners[0](),  # noqa: PLW0108
        )
    assert pending == [2]


@both_modes
def test_weights_that_were_not_run_end_the_step_with_an_error(
    x: torch.Tensor, replays: bool
) -> None:
    graphs = warmed(x, replays=replays)
    half, weights = partial(backward, graphs, x), partial(graphs.weights.run, 0)
    with pytest.raises(SlotError, match=r"1 weight gradients were not run \(microbatch 1 of"):
        step(graphs, half, weights, half)
    step(graphs, half, weights)  # the failed step leaves nothing over


@both_modes
def test_weights_run_once(x: torch.Tensor, replays: bool) -> None:
    graphs = warmed(x, replays=replays)
    half = partial(backward, graphs, x)
    runners: list[Callable[[], None]] = []
    with pytest.raises(SlotError, match="no microbatch waits"):
        step(graphs, partial(graphs.weights.run, 0))
    with pytest.raises(SlotError, match="no microbatch waits"):
        step(graphs, partial(graphs.weights.runner, 0))
    with pytest.raises(SlotError, match="been run already"):
        step(
            graphs,
            half,
            lambda: runners.append(graphs.weights.runner(0)),
            lambda: runners[0](),  # noqa: PLW0108
            half,
            lambda: runners[0](),  # noqa: PLW0108
        )
    with pytest.raises(SlotError, match="no microbatch waits"):
        graphs.weights.run(0)


def test_a_slot_is_in_use_until_its_weights_have_run(x: torch.Tensor) -> None:
    graphs = warmed(x, num_slots=1)
    half = partial(backward, graphs, x)
    with pytest.raises(SlotError, match="input gradient done, waits for its weight gradient"):
        step(graphs, half, half)


def test_a_whole_backward_has_no_weight_half() -> None:
    backend = RecorderBackend()
    graphs: Any = ChunkGraphs([Block()], 1, backend=backend)
    graphs.weights = WeightBackwards(graphs)
    with pytest.raises(SlotError, match="program=SPLIT"):
        step(graphs, partial(graphs.weights.run, 0))


def test_one_backward_through_two_microbatches_is_refused(x: torch.Tensor) -> None:
    graphs = warmed(x)
    call = graphs.callables[0]
    with pytest.raises(ReplayMismatchError, match="several microbatches"):
        step(graphs, lambda: (call(x) + call(x)).sum().backward())


def test_chunks_that_share_a_parameter_are_refused() -> None:
    backend = RecorderBackend()
    block, x = Block(), inputs_of(backend.device, 1)[0]
    chunks = [
        Chunk.from_module(block, "chunk 0", program=SPLIT),
        Chunk.from_module(nn.Sequential(block, Block()), "chunk 1"),
    ]
    graphs = ChunkGraphs(chunks, 1, backend=backend)
    with pytest.raises(CaptureError, match="chunk 1 and chunk 0 share a parameter of shape"):
        graphs.capture([x, x])


class _Fused(torch.autograd.Function):
    """Adds its weight gradient to ``main_grad`` while the input gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.flatten(0, 1).t() @ x.flatten(0, 1))
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.empty_like(weight)


class Fused(nn.Linear):
    """A linear layer that uses `_Fused`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Fused.apply(x, self.weight)


@copy_with_gradient
def _in_place(grad: torch.Tensor) -> torch.Tensor:
    """Scale the incoming gradient in place, which a parameter may already hold."""
    return grad.mul_(2.0)


class Shifted(nn.Module):
    """The shift and the input get the same gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2, 5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (_in_place(x) + self.shift) * 2.0


class Stashed(nn.Linear):
    """Saves its input in memory that all microbatches share."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        store = torch.zeros(2 * 5, WIDTH)

        def pack(tensor: torch.Tensor) -> torch.Tensor | None:
            if tensor.shape != store.shape:
                return tensor
            store.copy_(tensor)
            return None

        def unpack(packed: torch.Tensor | None) -> torch.Tensor:
            return store.clone() if packed is None else packed

        self.stashing = lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.stashing():
            return super().forward(x)


def unseen_before_head() -> nn.Module:
    """Make layers whose head computes from its gradient the one that a kernel reads."""
    layers = {"first": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, WIDTH)}
    return Apply(lambda m, x: m.head(unseen(m.first(x))).tanh(), **layers)


class Hooked(nn.Linear):
    """A hook reads the gradient of a transposed weight by its address."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t()
        weight.register_hook(lambda gradient: None if gradient.data_ptr() else gradient)
        return x @ weight


def with_main_grad() -> nn.Module:
    module = Fused(WIDTH, WIDTH, bias=False)
    module.weight.main_grad = torch.zeros_like(module.weight)  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    "model",
    [
        Shifted,  # what is changed in place is read before
        Stashed,  # memory that every forward writes is read in the input half
        unseen_before_head,  # what an unseen kernel reads is not deferred
    ],
)
def test_what_the_weight_half_would_read_too_late_is_read_in_time(
    model: Callable[[], nn.Module], lag: int
) -> None:
    eager, module = model(), model()
    module.load_state_dict(eager.state_dict())
    inputs = inputs_of(torch.device("cpu"), 3)
    graphs = as_split(module, RecorderBackend())
    graphs.capture([inputs[0]])
    assert_equal(run_split(graphs, inputs, lag), run_eagerly(eager, inputs))
    assert_equal(gradients(module), gradients(eager))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_main_grad, "delay_wgrad_compute=True"),
        (lambda: Hooked(WIDTH, WIDTH), "weight gradient, .* whole backward"),
    ],
    ids=["added too early", "read by a hook"],
)
def test_weight_gradients_that_cannot_wait_are_refused(
    x: torch.Tensor, model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(CaptureError, match=message):
        as_split(model(), RecorderBackend()).capture([x])


def test_the_end_of_a_backward_is_that_of_the_input_half() -> None:
    backend = RecorderBackend()
    x, ends = inputs_of(backend.device, 1)[0], torch.zeros(1)
    chunk = replace(
        Chunk.from_module(Block(), "rank 0 chunk 0", program=SPLIT),
        end_of_backward=lambda: ends.add_(1.0),
    )
    graphs = ChunkGraphs([chunk], 2, backend=backend)
    weights = WeightBackwards(graphs)
    graphs.capture([x])
    with graphs.step(2):
        for number in (1, 2):
            before = ends.item()
            backward(graphs, x)
            assert ends.item() == before + 1, number
        weights.run(0)
        weights.run(0)
        assert ends.item() == before + 1


def test_numbers_and_ranges_know_the_halves() -> None:
    backend = RecorderBackend()
    graphs: Any = ChunkGraphs(
        [Chunk.from_module(Block(), "rank 0 chunk 0", program=SPLIT)],
        2,
        backend=backend,
    )
    graphs.weights = WeightBackwards(graphs)
    x = inputs_of(backend.device, 1)[0]
    report = graphs.capture([x])
    assert (report.num_graphs, graphs.counters.captures) == (6, 2)
    graphs.observe(ReplayRanges(["stage 0"]))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_split(graphs, [x, x], 1)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    assert [event.name for event in events if " microbatch " in event.name] == [
        "stage 0 forward microbatch 0",
        "stage 0 backward microbatch 0",
        "stage 0 forward microbatch 1",
        "stage 0 backward microbatch 1",
        "stage 0 weight gradient microbatch 0",
        "stage 0 weight gradient microbatch 1",
    ]
    assert "weight_replays=2" in repr(graphs)


def test_no_input_gradient_means_no_input_graph() -> None:
    backend = RecorderBackend()
    graphs = as_split(Block(), backend, num_slots=2)
    report = graphs.capture([inputs_of(backend.device, 1, requires_grad=False)[0]])
    assert report.num_graphs == 4
    assert all("I" not in slot.graphs for slot in graphs._captured.slots[0])


def test_eager_steps_have_a_weight_half_of_a_chunk_without_backward() -> None:
    """Such as a frozen first stage, which has forward graphs alone; its W is nothing."""
    x = inputs_of(torch.device("cpu"), 1, requires_grad=False)[0]
    graphs = as_split(Block().requires_grad_(False), RecorderBackend(), num_slots=2)
    call, run = partial(graphs.callables[0], x), partial(graphs.weights.run, 0)
    step(graphs, call, call, run, run)
    graphs.capture([x])
    step(graphs, call, call, run, run)
    assert (graphs.counters.replays, graphs.counters.weight_replays) == (2, 0)

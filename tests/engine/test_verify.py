"""The verify modes keep training's numbers, and name the layer of a wrong replay."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from toys import Apply, capture, copy_with_gradient, sample

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import VerifyError
from chunkgraph.graphs import GraphBackend, tensor_at

WIDTH = 8


HIDDEN: dict[int, list[tuple[int, int]]] = {}


class Layer(nn.Module):
    """Records its hidden state, so that a test can write to that memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = array("d", [1.0])  # not among the values that steps compare
        HIDDEN[id(self)] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).tanh()
        HIDDEN[id(self)].append((h.data_ptr(), h.numel()))
        return h * self.scale[0]


class Stack(nn.Module):
    """A chunk of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x)


@pytest.fixture
def stack(backend: GraphBackend) -> Stack:
    torch.manual_seed(3)
    return Stack().to(backend.device)


@pytest.fixture
def attach(stack: Stack, backend: GraphBackend) -> Callable[..., ChunkGraphs]:
    def make(num_slots: int = 2, **options: Any) -> ChunkGraphs:
        return capture(stack, sample(backend), backend=backend, num_slots=num_slots, **options)

    return make


def train(graphs: ChunkGraphs, backend: GraphBackend, num_microbatches: int = 1) -> None:
    with graphs.step(num_microbatches):
        for _ in range(num_microbatches):
            graphs.callables[0](sample(backend)).square().sum().backward()


def train_in_flight(
    graphs: ChunkGraphs,
    backend: GraphBackend,
    num_microbatches: int,
    meddle: Callable[[], object],
    order: int = 1,
) -> None:
    """Run all forwards, `meddle`, then all backwards in order, or in reverse with -1."""
    with graphs.step(num_microbatches):
        flying = [graphs.callables[0](sample(backend)) for _ in range(num_microbatches)]
        meddle()
        for y in flying[::order]:
            y.square().sum().backward()


def slot_of(graphs: ChunkGraphs, index: int = 0) -> Any:
    return graphs._captured.slots[0][index]


def keeping_output(slot: Any, fill: Callable[[], None]) -> None:
    """Fill a slot, except its output: the caller still reads it to compute its gradient."""
    kept = slot.outputs.tensors[0].clone()
    fill()
    slot.outputs.tensors[0].copy_(kept)


def test_a_receive_that_ends_during_an_eager_pass_is_kept(backend: GraphBackend) -> None:
    """A module may hold the memory of an earlier input, as Megatron's blocks do."""
    arriving: list[Callable[[], object]] = []

    def arrive(grad: torch.Tensor) -> torch.Tensor:
        while arriving:
            arriving.pop()()
        return grad.clone()

    chunk = Apply(
        lambda m, x: copy_with_gradient(arrive)(m.linear(x)),
        linear=nn.Linear(WIDTH, WIDTH),
        received=None,
    )
    graphs = capture(chunk, sample(backend), backend=backend, num_slots=2, verify="shadow")
    call, sent = graphs.callables[0], sample(backend)
    with graphs.step(3):
        chunk.received = graphs.reserve_input(0)
        first, second = call(chunk.received), call(sample(backend))
        first.sum().backward()
        memory = graphs.reserve_input(0)
        assert memory.data_ptr() == chunk.received.data_ptr()
        arriving.append(lambda: memory.detach().copy_(sent))
        second.sum().backward()
        third = call(memory)
        assert torch.equal(third, chunk(sent))
        third.sum().backward()
    assert not arriving


def test_a_number_of_python_that_changes_after_the_capture(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="shadow")
    train(graphs, backend, 3)
    stack.layers[1].scale[0] = 2.0
    with pytest.raises(VerifyError) as error:
        train(graphs, backend)
    message = str(error.value)
    assert "chunk 0 slot 0: the replayed forward of microbatch 0 in replayed step 1" in message
    assert "output 0 differs by" in message
    # The scale is the last operation of its layer; a tensor of the next layer shows it first.
    assert "first layer that differs: layers.2.linear" in message
    assert "the last correct tensor is kept by layers.1" in message
    stack.layers[1].scale[0] = 1.0
    train(graphs, backend, 2)  # the failed step leaves nothing over


def test_an_input_overwritten_before_the_backward(
    attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="shadow")
    static_input = slot_of(graphs, 1).inputs.tensors[0]
    with pytest.raises(VerifyError) as error:
        train_in_flight(graphs, backend, 2, lambda: static_input.fill_(7.0))
    message = str(error.value)
    assert "chunk 0 slot 1: the replayed backward of microbatch 1" in message
    assert "layers.0.linear" in message
    assert "overwritten later" in message


def test_a_saved_tensor_overwritten_before_the_backward(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="shadow")
    address, num_elements = HIDDEN[id(stack.layers[1])][-2]  # from the capture of slot 0
    saved = tensor_at(address, 4 * num_elements, backend.device).view(torch.float32)
    with pytest.raises(VerifyError) as error:
        train_in_flight(graphs, backend, 1, lambda: saved.mul_(1.5))
    message = str(error.value)
    assert "chunk 0 slot 0: the replayed backward of microbatch 0" in message
    # Later layers ran backward before it, correctly.
    assert "the gradient of layers.1.linear." in message
    assert "first layer that differs: layers.1" in message
    assert "the last correct tensor is kept by layers.1.linear" in message


def test_a_buffer_and_the_random_state_are_compared(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="shadow")
    replay = slot_of(graphs).graphs["F"].replay

    def and_draw() -> None:
        replay()
        torch.rand(1, device=backend.device)

    slot_of(graphs).graphs["F"].replay = and_draw
    with pytest.raises(VerifyError, match="random state"):
        train(graphs, backend)


@pytest.mark.parametrize(
    ("options", "verified"),
    [
        ({"num_verify_steps": 2}, [0, 1]),
        ({"num_verify_steps": 0}, []),
    ],
)
def test_only_the_steps_asked_for_are_verified(
    stack: Stack,
    attach: Callable[..., ChunkGraphs],
    backend: GraphBackend,
    options: dict[str, int],
    verified: list[int],
) -> None:
    graphs = attach(verify="shadow", **options)
    stack.layers[0].scale[0] = 3.0
    seen = []
    for step in range(7):
        try:
            train(graphs, backend)
        except VerifyError:
            seen.append(step)
            graphs.counters.replayed_steps += 1  # the failed step ended early
    assert seen == verified


def test_a_nan_of_the_model_itself_is_named_once_and_trained_on(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="poison")
    train(graphs, backend)
    with torch.no_grad():
        stack.layers[1].linear.bias[2] = float("nan")
    with pytest.warns(UserWarning, match="NaN") as records:
        train(graphs, backend, 3)
    assert len(records) == 1
    message = str(records[0].message)
    assert "chunk 0 slot 0: the replayed forward of microbatch 0 in replayed step 1" in message
    assert "first layer with a NaN is layers.1 " in message
    assert graphs.counters.replays == 4


def test_a_nan_from_outside_is_not_blamed_on_a_layer(
    attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    graphs = attach(verify="poison")
    with pytest.warns(UserWarning, match="came in with the input") as records, graphs.step(1):
        graphs.callables[0](sample(backend) * float("nan")).sum().backward()
    assert len(records) == 1
    graphs = attach(verify="poison")
    with pytest.warns(UserWarning, match="from work after the chunk") as records, graphs.step(1):
        (graphs.callables[0](sample(backend)) * float("nan")).sum().backward()
    assert len(records) == 1


@pytest.mark.parametrize("drops_gradients", [True, False])
def test_poison_still_finds_dead_memory_after_a_nan_of_the_model(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend, drops_gradients: bool
) -> None:
    """Also where the NaN stays in gradients that are never cleared."""
    graphs = attach(verify="poison")
    with pytest.warns(UserWarning, match="came in with the input"), graphs.step(1):
        graphs.callables[0](sample(backend) * float("nan")).sum().backward()
    if drops_gradients:
        stack.zero_grad(set_to_none=True)
    train(graphs, backend)
    inner = slot_of(graphs).memory.pool.poison
    with pytest.raises(VerifyError, match="memory that was no longer its own"):
        train_in_flight(graphs, backend, 1, lambda: keeping_output(slot_of(graphs), inner))


def test_a_nan_of_the_backward_is_named_by_its_first_gradient(backend: GraphBackend) -> None:
    nan_in_backward = copy_with_gradient(lambda grad: grad * float("nan"))

    def bad(module: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, third = module.layers
        return third(nan_in_backward(second(first(x))))

    chunk = Apply(bad, layers=nn.ModuleList(Layer() for _ in range(3)))
    graphs = capture(chunk, sample(backend), backend=backend, verify="poison")
    with pytest.warns(UserWarning, match=r"backward of .*is that of layers\.1\.linear\."):
        train(graphs, backend)


def test_poison_names_the_layer_that_read_dead_memory(
    stack: Stack, attach: Callable[..., ChunkGraphs], backend: GraphBackend
) -> None:
    """The slot's pool is freed too early: its backward reads NaN, an eager one does not."""
    graphs = attach(verify="poison")
    inner = slot_of(graphs).memory.pool.poison
    with pytest.raises(VerifyError) as error:
        train_in_flight(graphs, backend, 1, lambda: keeping_output(slot_of(graphs), inner))
    message = str(error.value)
    assert "chunk 0 slot 0: the replayed backward of microbatch 0" in message
    assert "memory that was no longer its own" in message
    assert "first layer with a NaN: layers.0" in message


def test_poison_accepts_infinite_gradients_that_add_up_to_a_nan(backend: GraphBackend) -> None:
    chunk = Apply(lambda m, x: x + m.bias, bias=nn.Parameter(torch.zeros(8)))
    graphs = capture(chunk, sample(backend), backend=backend, verify="poison")
    with graphs.step(2):
        for sign in (1, -1):
            (graphs.callables[0](sample(backend)) * (sign * torch.inf)).sum().backward()
    assert chunk.bias.grad.isnan().all()

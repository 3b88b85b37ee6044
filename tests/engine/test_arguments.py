"""Arguments that differ from the captured ones in anything a graph depends on are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import Apply, capture

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import RecorderBackend


class Color(Enum):
    RED = 1


@dataclass
class Settings:
    scale: float = 1.0
    sizes: tuple[int, ...] = (1, 2)


class Layer(nn.Module):
    """A layer that passes further arguments to a function."""

    def __init__(self, use: Callable[..., Any] = lambda _: 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.use = use

    def forward(self, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return self.linear(x) * self.use(*arguments) if arguments else self.linear(x)


def captured(module: nn.Module, *args: Any) -> ChunkGraphs:
    return capture(module, *args, backend=RecorderBackend())


def call(graphs: ChunkGraphs, *args: Any) -> torch.Tensor:
    with graphs.step(1):
        result = graphs.callables[0](*args)
        result.sum().backward()
    return result.detach().clone()


def x() -> torch.Tensor:
    return torch.ones(3, 4)


SAME_VALUES: list[Callable[[], Any]] = [
    lambda: float("nan"),
    lambda: Color.RED,
    Settings,
    lambda: {1, 2},
    lambda: torch.bfloat16,
    lambda: np.float32(1.0),
    lambda: {"a": [1, (2.0, None)]},
    lambda: F.relu,
]


@pytest.mark.parametrize("make", SAME_VALUES)
def test_equal_values_of_different_objects_are_equal(make: Callable[[], Any]) -> None:
    graphs = captured(Layer(), x(), make())
    call(graphs, x(), make())
    assert graphs.counters.replays == 1


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (Settings(), Settings(2.0)),
        (F.relu, F.gelu),
        ("a" * 10_000, "b" * 10_000),
    ],
)
def test_another_value_is_refused_with_a_short_message(was: Any, now: Any) -> None:
    graphs = captured(Layer(), x(), was)
    with pytest.raises(ReplayMismatchError, match="argument 1: captured") as refused:
        call(graphs, x(), now)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("value", "change", "use"),
    [
        (Settings(), lambda v: setattr(v, "scale", 2.0), lambda v: v.scale),
        ({"a": [1.0]}, lambda v: v["a"].append(2.0), lambda v: sum(v["a"])),
    ],
)
def test_one_object_whose_content_changes_is_refused(
    value: Any, change: Callable[[Any], None], use: Callable[[Any], float]
) -> None:
    graphs = captured(Layer(use), x(), value)
    assert torch.equal(call(graphs, x(), value), Layer(use)(x(), value))
    change(value)
    with pytest.raises(ReplayMismatchError, match="captured"):
        call(graphs, x(), value)


class Opaque:
    """An object without a comparison."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Opaque(), "argument 1 is an object of type Opaque and cannot be compared"),
        (Settings(scale=torch.ones(1)), r"argument 1\.scale is a tensor in an object"),  # type: ignore[arg-type]
        (np.ones(1), "an object of type ndarray"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_the_capture(value: Any, named: str) -> None:
    with pytest.raises(CaptureError, match=named):
        captured(Layer(), x(), value)


def test_a_forward_that_changes_an_argument_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes the contents of an argument"):
        captured(Layer(lambda log: log.append(1) or 1.0), x(), [])


def test_sizes_are_plain_values() -> None:
    x = torch.ones(3, 4)
    module = Apply(lambda m, x, size: (m.linear(x).view(size), x.shape), linear=nn.Linear(4, 2))
    graphs = ChunkGraphs(module, 1, backend=RecorderBackend())
    for _ in range(2):
        with graphs.step(1):
            output, size = graphs.callables[0](x, torch.Size([2, 3]))
            output.sum().backward()
        assert output.shape == (2, 3)
        assert isinstance(size, torch.Size)
    assert graphs.counters.replays == 1
    with graphs.step(1), pytest.raises(ReplayMismatchError, match="argument 1: captured"):
        graphs.callables[0](x, torch.Size([3, 2]))


def test_a_sparse_tensor_is_refused() -> None:
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(CaptureError, match="argument 0 is a sparse tensor"):
        captured(Layer(), sparse)


def test_an_embedding_with_sparse_gradients_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"0 is an embedding with sparse=True.*sparse=False"):
        captured(module, torch.tensor([[1, 2]]))


def test_another_layout_is_refused_unless_only_sizes_of_one_differ() -> None:
    graphs = captured(Layer(), torch.ones(3, 1, 4))
    strided = torch.ones(3, 1, 4).as_strided((3, 1, 4), (4, 9, 1))
    call(graphs, strided)
    with pytest.raises(ReplayMismatchError, match=r"called .*strides \(1, 3, 3\)"):
        call(graphs, torch.ones(4, 1, 3).permute(2, 1, 0))


def test_one_tensor_as_several_arguments_is_one_in_the_graph() -> None:
    """The module compares identities, and autograd adds up the gradients of all uses at once."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    inputs = [torch.randn(2, 3, 8, requires_grad=True) for _ in range(3)]
    graphs = ChunkGraphs(attention, 1, backend=RecorderBackend())
    results: list[torch.Tensor] = []
    for tensor in inputs:
        with graphs.step(1):
            result, _ = graphs.callables[0](tensor, tensor, tensor)
            result.square().sum().backward()
        results += [result.detach().clone(), tensor.grad.clone()]  # type: ignore[union-attr]
        tensor.grad = None
    assert graphs.counters.replays == 2
    for tensor, result, grad in zip(inputs, results[::2], results[1::2], strict=True):
        expected, _ = attention(tensor, tensor, tensor)
        expected.square().sum().backward()
        assert torch.equal(result, expected)
        assert torch.equal(grad, tensor.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("were_one", [True, False])
def test_another_pattern_of_identical_tensors_is_refused(were_one: bool) -> None:
    one, two = x(), x()
    patterns = ((one, one), (one, two))
    graphs = captured(Layer(), *patterns[not were_one])
    with pytest.raises(ReplayMismatchError, match=r"argument 1: .*the same tensor as argument 0"):
        call(graphs, *patterns[were_one])


def test_arguments_too_many_or_too_few_are_named() -> None:
    graphs = captured(Layer(), x(), {"scale": 1.0})
    with pytest.raises(ReplayMismatchError, match=r"1\['scale'\]: captured 1.0, called nothing"):
        call(graphs, x())
    with pytest.raises(ReplayMismatchError, match=r"1\['b'\]: captured nothing, called 2"):
        call(graphs, x(), {"scale": 1.0, "b": 2})


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(lambda v: f(v).sum())(x()),
        lambda f: torch.func.vmap(f)(x()[None]),
    ],
)
@pytest.mark.parametrize("is_captured", [True, False])
def test_transforms_of_functions_around_a_callable_are_refused(
    transform: Callable[[Any], Any], is_captured: bool
) -> None:
    graphs = ChunkGraphs(Layer(), 1, backend=RecorderBackend())
    if is_captured:
        graphs.capture([x()])
    else:
        with graphs.step(1):
            transform(graphs.callables[0])  # eager steps allow this
    error = ReplayMismatchError if is_captured else CaptureError
    with pytest.raises(error, match=r"under torch\.func"), graphs.step(1):
        transform(graphs.callables[0])

"""Gradients of vectors wait for the end of a backward; their sums are those of ``add_``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.engine.vector_gradients import VectorGradients
from chunkgraph.graphs import GraphBackend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_those_of_add(device: str) -> None:
    generator = torch.Generator(device).manual_seed(5)
    vectors, wanted, sinks = VectorGradients(), [], []
    for i, (to, dtype) in enumerate([*KINDS, *KINDS]):
        shape = (1 + 977 * i,) if i else ()
        sink = torch.randn(shape, generator=generator, device=device).to(to)
        gradient = torch.randn(shape, generator=generator, device=device).to(dtype)
        wanted.append(sink.clone().add_(gradient))
        sinks.append(sink)
        before = sink.clone()
        assert vectors.take(i, sink, gradient)
        assert torch.equal(sink, before)
    vectors.add_all()
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(sinks, wanted, strict=True))
    vectors.add_all()  # nothing is left
    assert all(torch.equal(_bits(a), _bits(b)) for a, b in zip(sinks, wanted, strict=True))


def test_two_gradients_of_one_vector_are_added_in_their_order() -> None:
    sink, vectors = torch.tensor([1e8]), VectorGradients()
    assert vectors.take(0, sink, torch.tensor([-1e8]))
    assert vectors.take(0, sink, torch.tensor([1.0]))
    vectors.add_all()
    assert sink.item() == 1.0  # the other way round 1e8 swallows it


def test_what_is_no_small_vector_of_its_own_memory_is_not_kept() -> None:
    vectors = VectorGradients()
    assert not vectors.take(0, torch.zeros(2, 3), torch.zeros(2, 3))
    assert not vectors.take(0, torch.zeros(1 << 17), torch.zeros(1 << 17))
    assert not vectors.take(0, torch.zeros(6), torch.zeros(1))
    workspace = torch.zeros(8)
    assert not vectors.take(0, torch.zeros(4), workspace[:4])
    assert vectors.take(0, torch.zeros(8), workspace.clone())


class Layer(nn.Module):
    """Vectors of several kinds, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x * self.scale)) * self.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_a_chunk_of_them_trains_as_eagerly(
    backend: GraphBackend, dtype: torch.dtype, has_main_grad: bool
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*[Layer() for _ in range(3)]).to(backend.device, dtype)
    twin = copy.deepcopy(model)
    for chunk in (model, twin):
        for parameter in chunk.parameters() if has_main_grad else ():
            parameter.main_grad = torch.zeros(parameter.shape, device=backend.device)
    for parameter in twin.parameters() if has_main_grad else ():
        parameter.register_post_accumulate_grad_hook(_add_to_main_grad)
    graphs = ChunkGraphs([model], [1], backend=backend)
    x = torch.randn(4, 16, device=backend.device, dtype=dtype)
    graphs.capture([(x,)])
    for scale in (1.0, 3.0):
        with graphs.step(2):
            for call in (graphs.callables[0], graphs.callables[0]):
                call(x * scale).float().sin().sum().backward()
        for _ in range(2):
            twin(x * scale).float().sin().sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            a, b = (p.main_grad if has_main_grad else p.grad for p in (mine, theirs))
            assert torch.equal(_bits(a), _bits(b))
            assert a.abs().sum() > 0


def _add_to_main_grad(parameter: torch.Tensor) -> None:
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None

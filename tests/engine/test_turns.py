"""A late backward whose slot holds another microbatch by then is refused."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from chunkgraph.engine import ChunkGraphs
from chunkgraph.errors import SlotError
from chunkgraph.graphs import GraphBackend


@pytest.fixture
def graphs(backend: GraphBackend) -> ChunkGraphs:
    layer = nn.Linear(4, 4).to(backend.device)
    graphs = ChunkGraphs([layer], [1], backend=backend)
    graphs.capture([new_input(backend)])
    return graphs


def new_input(backend: GraphBackend) -> torch.Tensor:
    return torch.randn(3, 4, device=backend.device, requires_grad=True)


def backward_twice(graphs: ChunkGraphs, backend: GraphBackend) -> None:
    with graphs.step(2):
        first = graphs.callables[0](new_input(backend)).sum()
        first.backward(retain_graph=True)
        graphs.callables[0](new_input(backend))
        first.backward()


def abort(graphs: ChunkGraphs, x: torch.Tensor, left: list[torch.Tensor]) -> None:
    with graphs.step(1):
        left.append(graphs.callables[0](x))
        raise KeyError


def backward_of(graphs: ChunkGraphs, x: torch.Tensor, left: torch.Tensor) -> None:
    with graphs.step(1):
        graphs.callables[0](x)
        left.sum().backward()


def reserve_and_abort(graphs: ChunkGraphs) -> None:
    with graphs.step(1):
        assert graphs.reserve_input(0) is not None
        raise KeyError


def test_a_second_backward_is_not_run_on_the_next_microbatch(
    graphs: ChunkGraphs, backend: GraphBackend
) -> None:
    with pytest.raises(SlotError, match="now holds another microbatch"):
        backward_twice(graphs, backend)


def test_a_backward_of_an_aborted_step_is_not_run_in_the_next(
    graphs: ChunkGraphs, backend: GraphBackend
) -> None:
    left: list[torch.Tensor] = []
    with pytest.raises(KeyError):
        abort(graphs, new_input(backend), left)
    with pytest.raises(SlotError, match="now holds another microbatch"):
        backward_of(graphs, new_input(backend), left[0])
    with graphs.step(1):  # neither leaves anything over
        graphs.callables[0](new_input(backend)).sum().backward()


def test_nothing_holds_a_slot_that_was_reserved_in_an_aborted_step(graphs: ChunkGraphs) -> None:
    """After the graphs are released."""
    slot = weakref.ref(graphs._captured.slots[0][0])  # type: ignore[union-attr]
    with pytest.raises(KeyError):
        reserve_and_abort(graphs)
    graphs.release()
    gc.collect()
    assert slot() is None

"""A failed capture reports its cause to all ranks, and leaves no memory or state over."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from toys import Apply

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.errors import CaptureError, IllegalOperationError, ReplayMismatchError
from chunkgraph.graphs import RecorderBackend

WIDTH = 256


class Layer(nn.Module):
    def __init__(self, *, syncs: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.syncs = syncs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.syncs:
            h = h * float(h.sum())
        return h.tanh()


def chunk_of(*syncs: bool) -> Chunk:
    torch.manual_seed(0)
    module = Apply(lambda m, x: m.layers(x), layers=nn.Sequential(*(Layer(syncs=s) for s in syncs)))
    return Chunk(
        forward=module,
        parameters=tuple(module.parameters()),
        label="rank 3 chunk 0",
        module=module,
        module_name="decoder",
    )


def sample() -> torch.Tensor:
    return torch.randn(64, WIDTH, requires_grad=True)


def train(graphs: ChunkGraphs) -> torch.Tensor:
    with graphs.step(1):
        y = graphs.callables[0](sample())
        y.sum().backward()
    return y.detach().clone()


def test_the_layer_is_named_next_to_operator_and_line() -> None:
    graphs = ChunkGraphs([chunk_of(False, True, True)], [2], backend=RecorderBackend())
    with pytest.raises(IllegalOperationError) as error:
        graphs.capture([sample()])
    message = str(error.value)
    assert "torch.Tensor.__float__" in message
    assert "test_failures.py:" in message
    assert "\n  in layer decoder.layers.1\n  To do:" in message


@pytest.mark.parametrize("on_failure", ["eager", "raise"])
def test_out_of_memory_reports_the_numbers_and_frees_all_of_it(
    on_failure: Any, no_collector: None
) -> None:
    """Without the garbage collector, since the GPU's memory is needed at once."""
    backend = RecorderBackend(limit_bytes=3 * 2**20)
    options = CaptureOptions(on_failure=on_failure)
    graphs = ChunkGraphs([chunk_of(False, False)], [5], backend=backend, options=options)
    train(graphs)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        with pytest.raises(CaptureError) if on_failure == "raise" else nullcontext():
            train(graphs)
    message = str(graphs.failure)
    assert len(records) == (on_failure == "eager")
    assert "Capturing rank 3 chunk 0 slot 2 forward ran out of memory" in message
    assert "Tried to allocate 1.00 MiB" in message
    assert "of which 0.00 MiB is free" in message
    assert "in layer decoder.layers.0.linear" in message
    assert backend.free_bytes() == 3 * 2**20
    assert train(graphs).isfinite().all()
    assert graphs.counters.replays == 0


def test_a_capture_that_is_interrupted_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = ChunkGraphs([chunk_of(False)], [1], backend=RecorderBackend())
    train(graphs)

    with monkeypatch.context() as patch:
        patch.setattr(graphs._replayer, "take", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(graphs)
    for _ in range(2):
        assert train(graphs).isfinite().all()
    assert graphs.counters.replays == 1


def test_a_loss_over_two_calls_is_refused_before_any_replay() -> None:
    module = nn.Linear(8, 8)
    graphs = ChunkGraphs(module, 2, backend=RecorderBackend())

    def train(num_calls: int) -> None:
        with graphs.step(num_calls):
            losses = [graphs.callables[0](torch.randn(2, 8)).sum() for _ in range(num_calls)]
            (losses[0] - losses[-1]).backward() if num_calls > 1 else losses[0].backward()

    train(2)
    with pytest.raises(CaptureError, match=r"(?s)several of its calls.*concatenated"):
        train(2)
    assert graphs.counters.replays == 0


@dataclass
class Hidden:
    value: torch.Tensor


def test_unknown_containers_as_outputs_are_named() -> None:
    module = Apply(lambda m, x: Hidden(m.linear(x)), linear=nn.Linear(8, 8))
    graphs = ChunkGraphs(module, 1, backend=RecorderBackend())
    with graphs.step(1):
        graphs.callables[0](torch.randn(2, 8)).value.sum().backward()
    with pytest.raises(CaptureError, match=r"no tensors in Hidden.*Return tuples"), graphs.step(1):
        pass


def test_gradients_of_parameters_by_autograd_grad_are_refused() -> None:
    module = nn.Linear(8, 8)
    graphs = ChunkGraphs(module, 1, backend=RecorderBackend())
    graphs.capture([torch.randn(2, 8)])
    with pytest.raises(ReplayMismatchError, match=r"autograd\.grad.*gradients of"), graphs.step(1):
        torch.autograd.grad(graphs.callables[0](torch.randn(2, 8)).sum(), [*module.parameters()])
    with graphs.step(1):
        graphs.callables[0](torch.randn(2, 8)).sum().backward()


def test_a_product_is_refused_though_the_sample_shows_no_difference() -> None:
    """The formula of its gradient depends on zeros; on ones, all formulas have the same bits."""
    module = Apply(lambda m, x: m.linear(x).prod(1), linear=nn.Linear(8, 8, bias=False))
    nn.init.eye_(module.linear.weight)
    graphs = ChunkGraphs(module, 1, backend=RecorderBackend())
    with pytest.raises(IllegalOperationError, match="ProdBackward reads device values"):
        graphs.capture([torch.ones(2, 8)])

"""FP8 weights that an optimizer writes, with stand-ins for Transformer Engine's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantized_weight import Quantized, QuantizedWeight

from chunkgraph.engine import Chunk, ChunkGraphs, Host
from chunkgraph.errors import CaptureError, ReplayMismatchError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.features.fp8 import Fp8State, keeps_transposes

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]


class _Host(Host):
    """The parts of Megatron's host that concern FP8."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def preserving(self) -> AbstractContextManager[None]:
        return self._state.around("session")

    def capturing(self) -> AbstractContextManager[None]:
        return self._state.around("capture")

    def verifying(self) -> AbstractContextManager[None]:
        return self._state.around("verify")


class _Training:
    """One captured module with FP8 weights, and the same in eager training."""

    def __init__(self, state_of: Any) -> None:
        cpu = torch.device("cpu")
        self.model, self.eager = Quantized(cpu), Quantized(cpu)
        self.state = state_of([[self.model]], ["rank 0 chunk 0"], cpu, is_delayed=False)
        chunk = Chunk(
            forward=self.model.forward,
            parameters=tuple(self.model.parameters()),
            label="rank 0 chunk 0",
            module=self.model,
        )
        part: Any = SimpleNamespace(index=0)
        self.graphs = ChunkGraphs(
            [self.state.wrap(part, chunk)],
            [1],
            backend=RecorderBackend(),
            host=_Host(self.state),
        )

    def step(self) -> None:
        x = torch.randn(4, self.model.width)
        step = SimpleNamespace(is_replayed=self.graphs.report is not None)
        with self.state.step(step), self.graphs.step(1):
            self.graphs.callables[0](x.clone().requires_grad_()).square().sum().backward()
        self.eager(x.clone().requires_grad_()).square().sum().backward()
        for ours, theirs in zip(self.model.parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        self.model.update()
        self.eager.update()


@pytest.fixture
def training(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Training]:
    import fp8_stand_in

    monkeypatch.setitem(sys.modules, fp8_stand_in.MODULE, fp8_stand_in)
    made = _Training(Fp8State)
    yield made
    made.graphs.release()


def test_steps_are_equal_to_eager(training: _Training) -> None:
    for _ in range(4):
        training.step()
    assert training.graphs.counters.replays == 3


def test_an_outdated_transpose_is_renewed_before_a_step(training: _Training) -> None:
    """As after an optimizer that writes only the data."""
    for _ in range(3):
        training.step()
        training.model.first._transpose_invalid = True
        training.model.first._transpose.fill_(3)


def test_a_transpose_that_a_capture_would_create_is_refused(training: _Training) -> None:
    with pytest.raises(CaptureError, match=r"(?s)first of Quantized .*num_warmup_steps"):
        training.graphs.capture([torch.randn(4, training.model.width, requires_grad=True)])


def test_weights_that_moved_are_refused(training: _Training) -> None:
    for _ in range(2):
        training.step()
    weight: Any = training.model.second
    weight._data = weight._data.clone()
    with pytest.raises(ReplayMismatchError, match="second of Quantized: its FP8 data"):
        training.step()


def test_attributes_of_megatron_are_no_memory_of_a_weight(training: _Training) -> None:
    for _ in range(2):
        training.step()
    weight: Any = training.model.first
    assert isinstance(weight, QuantizedWeight)
    weight.decoupled_grad = torch.zeros(3)
    training.step()


@pytest.mark.parametrize("keeps", [True, False])
def test_transposes_are_kept_by_releases_that_process_gathered_weights(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    package = "transformer_engine.pytorch.tensor"
    for name in ("transformer_engine", "transformer_engine.pytorch", package):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    utils = SimpleNamespace(**({"post_all_gather_processing": None} if keeps else {}))
    monkeypatch.setitem(sys.modules, f"{package}.utils", utils)
    assert keeps_transposes() is keeps
    monkeypatch.setitem(sys.modules, f"{package}.utils", None)
    assert not keeps_transposes()

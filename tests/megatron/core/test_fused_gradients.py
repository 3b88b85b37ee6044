"""Megatron's own layers that add weight gradients in a GEMM, without APEX's extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from extended_config import config_from_mapping
from in_process import Trained, detach_all

from chunkgraph.megatron.core import fused_gradients

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

calls: list[tuple[int, ...]] = []


def gemm(inputs: torch.Tensor, grad_outputs: torch.Tensor, total: torch.Tensor) -> None:
    calls.append(tuple(total.shape))
    total.add_(grad_outputs.t().matmul(inputs))


@pytest.fixture
def _fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    calls.clear()
    monkeypatch.setattr(fused_gradients, "_gemm", lambda: gemm)
    undo = fused_gradients.fuse_gradients()
    yield
    detach_all()
    undo()


def _config(make_config: Any, *, untied: bool) -> Any:
    return config_from_mapping(
        make_config(
            model={"untie_embeddings_and_output_weights": untied},
            train={"gradient_accumulation_fusion": True},
        )
    )


@pytest.mark.usefixtures("_fused")
@pytest.mark.parametrize("scope", ["block", "chunk"])
@pytest.mark.parametrize("untied", [True, False])
def test_captured_steps_equal_eager_ones(
    one_rank: Any, make_config: Any, untied: bool, scope: str
) -> None:
    config = _config(make_config, untied=untied)
    eager = Trained(one_rank, config, None)
    expected = [eager.results(step, 2) for step in range(3)]
    num_eager = len(calls)
    assert num_eager == 3 * 2 * 9  # four layers in each of two blocks, and the output layer
    graphed = Trained(one_rank, config, {"scope": scope})
    for step in range(3):
        found = graphed.results(step, 2)
        assert found.keys() == expected[step].keys()
        for name, value in found.items():
            assert torch.equal(value, expected[step][name]), name
    assert graphed.graphs.counters.replays == 4

"""Routes, and rows taken and summed, have the bits of torch's deterministic algorithms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.unique_indices import (
    scattered_routes,
    sum_rows,
    take_rows,
)

pytestmark = pytest.mark.megatron

_ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax first": {"use_pre_softmax": True},
    "sigmoid with groups": {
        "score_function": "sigmoid",
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
    "sigmoid with bias": {"score_function": "sigmoid", "expert_bias": [0.3, -0.2, 0.1, 0.0] * 2},
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Run a test with torch's deterministic algorithms, which only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def _routed(name: str, device: str) -> list[torch.Tensor]:
    """Return probabilities, the map, and the gradient of the logits."""
    router = import_megatron("megatron.core.transformer.moe.router")
    torch.manual_seed(6)
    logits = torch.randn(64, 8, device=device).requires_grad_()
    grads = torch.randn(64, 8, device=device)
    settings = {**_ROUTINGS[name]}
    if (bias := settings.pop("expert_bias", None)) is not None:
        settings["expert_bias"] = torch.tensor(bias, device=device)
    probs, chosen = router.topk_routing_with_score_function(logits, 2, **settings)
    return [probs, chosen, *torch.autograd.grad(probs, logits, grads)]


@pytest.mark.parametrize("name", _ROUTINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_routes_and_gradients_are_megatrons(device: str, name: str) -> None:
    expected = _routed(name, device)
    with ExitStack() as stack:
        stack.callback(scattered_routes())
        assert all(map(torch.equal, _routed(name, device), expected))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("name", _ROUTINGS)
def test_no_indices_are_sorted_for_routes_or_their_gradients(name: str) -> None:
    def are_sorted() -> bool:
        with torch.profiler.profile() as profile:
            _routed(name, "cuda")
        return any("RadixSort" in event.name for event in profile.events())

    assert are_sorted()
    with ExitStack() as stack:
        stack.callback(scattered_routes())
        assert not are_sorted()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shape", [(512,), (512, 24)])
def test_rows_are_summed_and_taken_like_deterministic_index_add(
    device: str, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(5)
    rows = torch.randn(shape, device=device).bfloat16().requires_grad_()
    places = torch.randint(0, 40, (512,), device=device)
    grads = torch.randn(40, *shape[1:], device=device).bfloat16()
    sums = torch.zeros_like(grads).index_add(0, places, rows)
    (expected,) = torch.autograd.grad(sums, rows, grads)
    own = sum_rows(rows, places, 40)
    assert torch.equal(own, sums)
    assert torch.equal(torch.autograd.grad(own, rows, grads)[0], expected)

    few = grads.clone().requires_grad_()
    taken = few.index_select(0, places)
    (expected,) = torch.autograd.grad(taken, few, rows)
    own = take_rows(few, places)
    assert torch.equal(own, taken)
    assert torch.equal(torch.autograd.grad(own, few, rows)[0], expected)

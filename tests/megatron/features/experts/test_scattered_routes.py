"""Routers that scatter their probabilities equal Megatron's deterministic routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.dispatch import scattered_routes

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
    with scattered_routes():
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
    with scattered_routes():
        assert not are_sorted()

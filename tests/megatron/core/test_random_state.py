"""Megatron's recomputation with a graph-safe tracker, whose states are generators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chunkgraph.megatron.core import random_state
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.core.random_state import RandomStates, masks_repeated

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(60)]


class Tracker:
    """A graph-safe tracker: its states are objects that draws move on."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {
            name: torch.Generator().manual_seed(seed)
            for seed, name in enumerate(("data-parallel-rng", "model-parallel-rng"))
        }

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return dict(self.states)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states = states


@pytest.fixture
def tracker(one_rank: Any, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    made = Tracker()
    monkeypatch.setattr(random_state, "_tracker", lambda: made)
    return made


@pytest.mark.every_release
def test_megatrons_checkpoint_draws_the_same_masks(tracker: Tracker) -> None:
    masks: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        generator = tracker.states["model-parallel-rng"]
        masks.append(torch.rand(x.shape, generator=generator) * torch.rand(x.shape))
        return x * masks[-1]

    checkpoint = import_megatron("megatron.core.tensor_parallel.random").CheckpointFunction
    with masks_repeated():
        x = torch.ones(5, requires_grad=True)
        y = checkpoint.apply(layer, False, x)
        layer(y)  # moves all states on
        before = [g.get_state() for g in tracker.states.values()], torch.get_rng_state()
        y.sum().backward()
    first, other, repeated = masks
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    assert torch.equal(x.grad, first)
    after = [g.get_state() for g in tracker.states.values()], torch.get_rng_state()
    assert all(map(torch.equal, after[0], before[0]))
    assert torch.equal(after[1], before[1])


def test_a_capture_switches_to_the_generators_that_draw_again(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = torch.tensor([1]), torch.tensor([2])
    again = tuple(torch.Generator() for _ in range(4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    saved = iter(states)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: next(saved))
    is_set: list[torch.Tensor] = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", is_set.append)
    of_forward = {id(states[0]): again}
    monkeypatch.setattr(random_state, "resumed_generators", lambda s: of_forward.get(id(s)))
    own = tracker.get_states()
    forward, backward = RandomStates(), RandomStates()
    forward.restore()
    assert list(tracker.states) == list(own)
    # The device's default generator comes first, and those that a user declares last.
    assert list(tracker.states.values()) == list(again[1:3])
    backward.restore()
    assert tracker.states == own
    assert [id(state) for state in is_set] == [id(state) for state in states]

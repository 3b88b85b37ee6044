"""Captures preserve random states, and refuse to set them."""

from __future__ import annotations

import threading

import pytest
import torch

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs import RecorderBackend
from chunkgraph.graphs.random_state import CapturedGenerator, answering_device_calls


def test_another_thread_keeps_its_calls_of_the_random_state() -> None:
    backend = RecorderBackend()
    seeds: list[int] = []
    with backend.capture("nothing", backend.new_pool("pool")):
        thread = threading.Thread(target=lambda: seeds.append(torch.manual_seed(7).initial_seed()))
        thread.start()
        thread.join()
    assert seeds == [7]
    assert torch.random.default_generator is torch.default_generator


def test_declared_generators_are_left_as_they_are_and_drawn_from_in_replays() -> None:
    backend = RecorderBackend()
    generator = torch.Generator().manual_seed(3)
    expected = [torch.rand(4, generator=generator) for _ in range(2)]
    generator.manual_seed(3)
    with backend.preserve_random_state([generator]):
        torch.rand(4, generator=generator)
        with backend.capture("draw", backend.new_pool("pool"), [generator]) as graph:
            out = torch.rand(4, generator=generator)
    results = []
    for _ in range(2):
        graph.replay()
        results.append(out.clone())
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_a_capture_on_a_gpu_draws_only_from_its_current_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint's backward sets the state that its forward saved, and puts the current back."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    draw = torch.ops.aten.rand.default, ([3],), {}
    forward, backward = CapturedGenerator("forward"), CapturedGenerator("backward")
    with answering_device_calls(forward):
        saved = torch.cuda.get_rng_state()
        forward.draw(*draw)
        forward.finish()
    with answering_device_calls(backward):
        current = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(saved)
        with pytest.raises(IllegalOperationError, match="in a recomputation"):
            backward.draw(*draw)
        with pytest.raises(IllegalOperationError, match="sets the random state"):
            backward.finish()
        torch.cuda.set_rng_state(current)
        backward.draw(*draw)
        backward.finish()
        torch.cuda.set_rng_state(current)  # from before the draw
        with pytest.raises(IllegalOperationError, match="in a recomputation"):
            backward.draw(*draw)
        with pytest.raises(IllegalOperationError, match="sets the random state"):
            torch.cuda.set_rng_state(torch.zeros(3, dtype=torch.uint8))

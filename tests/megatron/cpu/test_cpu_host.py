"""The CPU host: its replacements and their undoing, and random numbers that graphs repeat."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch

from chunkgraph.graphs import RecorderBackend
from chunkgraph.megatron.core.random_state import preserve_rng
from chunkgraph.megatron.cpu.host import HostRng, cpu_host

pytestmark = [pytest.mark.megatron, pytest.mark.every_release, pytest.mark.timeout(60)]

_RANDOM = "megatron.core.tensor_parallel.random"


@pytest.fixture
def host() -> Iterator[HostRng]:
    with cpu_host() as host:
        yield host


@pytest.fixture
def tracker(host: HostRng):  # type: ignore[no-untyped-def]
    random = importlib.import_module(_RANDOM)
    tracker = random.get_cuda_rng_tracker()
    torch.cuda.manual_seed(11)
    tracker.add("model-parallel-rng", 22)
    tracker.add("other", 33)
    return tracker


def test_cuda_means_cpu(host: HostRng) -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.empty(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.to("cuda").device.type == "cpu"
    assert torch.zeros(2, pin_memory=True).device.type == "cpu"
    assert tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.type(torch.float64).dtype == torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert not torch.cuda.is_available()


def test_everything_is_undone() -> None:
    random = importlib.import_module(_RANDOM)
    modules = (torch.cuda, random)
    before = [dict(module.__dict__) for module in modules]
    with cpu_host():
        for module, names in zip(modules, before, strict=True):
            assert module.__dict__ != names
    assert [dict(module.__dict__) for module in modules] == before
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")


def test_forks_draw_from_their_own_sequence(tracker) -> None:  # type: ignore[no-untyped-def]
    expected = torch.rand(6, generator=torch.Generator().manual_seed(22))
    outer = torch.rand(4, generator=torch.Generator().manual_seed(11))
    draws, around = [], [torch.rand(2)]
    for _ in range(3):
        with tracker.fork():
            draws.append(torch.rand(2))
            with tracker.fork("other"):
                torch.rand(5)
    around.append(torch.rand(2))
    assert torch.equal(torch.cat(draws), expected)
    assert torch.equal(torch.cat(around), outer)
    with pytest.raises(KeyError, match="missing"), tracker.fork("missing"):
        pass


def test_a_fork_that_fails_switches_back(host: HostRng, tracker) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ZeroDivisionError), tracker.fork():
        raise ZeroDivisionError
    assert host.current is host.default


def _noisy(tracker, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """A chunk with dropout from three sequences, as in a transformer layer."""
    with tracker.fork():
        x = torch.dropout(x, 0.5, train=True)
    x = torch.dropout(x, 0.5, train=True) + 1
    with tracker.fork("other"):
        return torch.dropout(x, 0.5, train=True)


def test_replays_draw_what_eager_calls_would(host: HostRng, tracker) -> None:  # type: ignore[no-untyped-def]
    x = torch.ones(64)
    with preserve_rng():
        expected = [_noisy(tracker, x) for _ in range(6)]
    assert not torch.equal(expected[0], expected[1])
    backend = RecorderBackend()
    pool = backend.new_pool("p")
    with preserve_rng(), backend.capture("noisy", pool) as graph:
        out = _noisy(tracker, x)
    draws = [_noisy(tracker, x)]
    for _ in range(4):
        graph.replay()
        draws.append(out.clone())
    draws.append(_noisy(tracker, x))  # eager and replayed draws alternate
    assert all(torch.equal(a, b) for a, b in zip(draws, expected, strict=True))

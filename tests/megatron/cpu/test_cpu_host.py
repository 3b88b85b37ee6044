"""The CPU host: its replacements and their undoing, and random numbers that graphs repeat."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator

import pytest
import torch
from toys import capturing

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs import RecorderBackend
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


def test_a_checkpoint_of_states_is_loaded_without_trust(tracker) -> None:  # type: ignore[no-untyped-def]
    """As Megatron loads ``--ckpt-format torch``."""
    torch.save(tracker.get_states(), file := io.BytesIO())
    file.seek(0)
    for name, state in torch.load(file, weights_only=True).items():
        assert torch.equal(state.get_state(), tracker.get_states()[name].get_state())


def test_a_refused_line_is_not_one_of_the_host(host: HostRng) -> None:
    with (
        pytest.raises(IllegalOperationError, match=rf"at {__file__}:"),
        capturing(RecorderBackend(), "chunk"),
    ):
        torch.ones(2).nonzero()

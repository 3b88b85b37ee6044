"""Host tensors in a CUDA capture; ``meta`` stands in for the device, and computes nothing."""

from __future__ import annotations

import gc

import pytest
import torch

from chunkgraph.errors import IllegalOperationError
from chunkgraph.graphs import GraphBackend
from chunkgraph.graphs.capture_mode import CaptureMode, HostMemory
from chunkgraph.graphs.cuda import CUDABackend
from chunkgraph.graphs.random_state import CapturedGenerator


def capturing(memory: HostMemory | None = None) -> CaptureMode:
    """Return the dispatch mode of a CUDA capture, for another device."""
    memory = memory or HostMemory(is_pinned=False)
    return CaptureMode("chunk", memory, CapturedGenerator("chunk"), device_type="meta")


def test_a_constant_is_copied_from_memory_that_stays() -> None:
    memory = HostMemory(is_pinned=False)
    x = torch.ones(2, 3, device="meta", dtype=torch.bfloat16)
    with capturing(memory):
        table = torch.arange(6.0).reshape(3, 2).mul_(2).t()
        y = table.to(x) * x
        x.copy_(table)
        torch.zeros(4).to(x)  # filled, not copied
    assert (y.dtype, y.shape, y.device.type) == (torch.bfloat16, (2, 3), "meta")
    held = list(memory._copies.values())
    assert [t.dtype for t in held] == [torch.bfloat16]
    assert torch.equal(held[0], (torch.arange(6.0).reshape(3, 2) * 2).t().bfloat16())
    assert held[0].untyped_storage().data_ptr() == memory.bytes.data_ptr()


def _draw_on_the_host(x: torch.Tensor) -> None:
    x * torch.rand(())


def test_a_draw_that_a_replay_would_not_repeat_is_refused_with_its_line() -> None:
    line = _draw_on_the_host.__code__.co_firstlineno + 1
    with pytest.raises(IllegalOperationError, match=f"{__file__}:{line}"), capturing():
        _draw_on_the_host(torch.ones(3, device="meta"))


def test_more_constants_than_there_is_memory_for_are_refused() -> None:
    x = torch.ones(3, device="meta")
    with pytest.raises(IllegalOperationError, match="more bytes"), capturing():
        torch.arange(5_000_000.0).to(x)


def test_constants_of_the_host_are_equal_to_eager(backend: GraphBackend) -> None:
    """Numbers and tables, changed on the host or on the device, over several replays."""
    x = torch.ones(3, device=backend.device)

    def program() -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0])
        table.mul_(2)
        on_device = torch.tensor([3, 2, 1], device=x.device, dtype=x.dtype)
        on_device.add_(x)
        state = torch.zeros(2, 3).to(x)
        state += x
        return (table.to(x) + on_device) * torch.tensor(3.0) + state.sum(0)

    with backend.capture("constants", backend.new_pool("pool")) as graph:
        out = program()
    for value in (2.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(out, program())


# Workspaces of matrix libraries are freed while no graph can hold their addresses.


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the backend's calls of torch, without a device."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    name = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, name, lambda: done.append("clear"), raising=False)
    return done


class Graph:
    """Stands in for torch's class, whose objects some releases do not make without a device."""


class GraphOfUser(Graph):
    pass


def test_workspaces_stay_while_any_graph_is_in_the_process(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    backend = object.__new__(CUDABackend)
    backend.device = torch.device("cuda", 0)
    gc.collect()
    backend.release_workspaces()
    assert done == ["wait", "clear", "empty"]
    done.clear()
    graphs = {"of a user": GraphOfUser()}
    backend.release_workspaces()
    assert done == ["wait", "empty"]
    done.clear()
    del graphs
    backend.release_workspaces()
    assert done == ["wait", "clear", "empty"]

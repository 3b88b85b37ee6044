"""Workspaces of matrix libraries are freed while no graph can hold their addresses."""

from __future__ import annotations

import gc

import pytest
import torch

from chunkgraph.graphs.cuda import CUDABackend


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

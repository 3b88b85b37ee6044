"""Graphs begin with copies whose sources change between replays."""

from __future__ import annotations

import pytest
import torch

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.layout import memory_of
from chunkgraph.graphs import CUDABackend, GraphBackend
from chunkgraph.graphs.copy_nodes import CopyNodes
from chunkgraph.graphs.graph_driver import GraphDriver


def test_each_replay_copies_from_the_present_source(backend: GraphBackend) -> None:
    """Also one that was written since, and nothing from the target itself."""
    target = torch.full((3,), -1.0, device=backend.device)
    sources = [torch.full((3,), float(i), device=backend.device) for i in range(3)]
    targets = [memory_of(target), None]
    with backend.capture("graph", backend.new_pool("slot"), targets=targets) as graph:
        y = target * 2
    node, none = graph.copy_nodes
    assert node is not None
    assert none is None
    graph.replay()
    assert y.tolist() == [-2.0] * 3
    for i in (0, 1, 1, 2, 0):
        sources[i].add_(10)
        node.read(sources[i].data_ptr())
        graph.replay()
        assert torch.equal(y, sources[i] * 2)
        assert torch.equal(target, sources[i])
    for value in (5.0, 6.0):
        target.fill_(value)
        node.read(target.data_ptr())
        graph.replay()
        assert y.tolist() == [value * 2] * 3
    node.read(sources[2].data_ptr())
    graph.replay()
    assert torch.equal(y, sources[2] * 2)


def test_copies_precede_all_branches_of_a_graph(backend: GraphBackend) -> None:
    a, b = (torch.zeros(1 << 16, device=backend.device) for _ in range(2))
    targets = [memory_of(a), memory_of(b)]
    with backend.capture("graph", backend.new_pool("slot"), targets=targets) as graph:
        if isinstance(backend, CUDABackend):
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                y = a + b
            z = b - a
            torch.cuda.current_stream().wait_stream(other)
        else:
            y, z = a + b, b - a
    for i in range(20):
        sources = [torch.full_like(a, float(i)), torch.full_like(b, 3.0 * i)]
        for node, source in zip(graph.copy_nodes, sources, strict=True):
            assert node is not None
            node.read(source.data_ptr())
        graph.replay()
        assert torch.equal(y, sources[0] + sources[1])
        assert torch.equal(z, sources[1] - sources[0])


@pytest.mark.gpu
def test_a_released_graph_loads_nothing() -> None:
    backend = CUDABackend()
    x = torch.zeros(2, device=backend.device)
    targets = [memory_of(x)]
    with backend.capture("graph", backend.new_pool("slot"), targets=targets) as graph:
        x + 1
    (node,) = graph.copy_nodes
    graph.release()
    assert node is not None
    with pytest.raises(RuntimeError, match="released"):
        node.read(torch.ones_like(x).data_ptr())


@pytest.mark.gpu
@pytest.mark.parametrize("is_changed", [True, False])
def test_replays_equal_eager_with_and_without_copy_nodes(is_changed: bool) -> None:
    """Without them, the host starts the copies."""
    device = torch.device("cuda")
    module = torch.nn.Linear(8, 8, device=device)
    chunk = Chunk(
        forward=module, parameters=tuple(module.parameters()), label="chunk", module=module
    )
    graphs = ChunkGraphs([chunk], [2], options=CaptureOptions(memset_kernels=is_changed))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    graphs.capture([(x,)])
    (slots,) = graphs._captured.slots  # type: ignore[union-attr]
    assert all((slot.grad_nodes[0] is not None) == is_changed for slot in slots)
    gradients = []
    for call in (graphs.callables[0], module):
        module.zero_grad()
        with graphs.step(4):
            for i in range(4):
                (call(x) * (i + 0.5)).backward(torch.randn(4, 8, device=device).fill_(i))
        gradients.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))


def test_a_torch_without_access_to_instantiated_graphs_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec", raising=False)
    driver = GraphDriver.__new__(GraphDriver)
    with pytest.raises(RuntimeError, match="raw_cuda_graph_exec"):
        CopyNodes(driver, torch.zeros(3, dtype=torch.int32))

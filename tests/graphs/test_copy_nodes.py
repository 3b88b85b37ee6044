"""Graphs begin with copies whose sources change between replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.layout import memory_of
from chunkgraph.graphs import CUDABackend, GraphBackend
from chunkgraph.graphs.copy_nodes import add_copy_nodes
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver
from chunkgraph.graphs.recorder.recorded_graph import RecordedCopy


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
    with backend.capture("graph", backend.new_pool("slot"), targets=[memory_of(x)]) as graph:
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
    module = nn.Linear(8, 8, device=device)
    chunk = Chunk.from_module(module, "chunk")
    graphs = ChunkGraphs([chunk], [2], options=CaptureOptions(memset_kernels=is_changed))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    graphs.capture([(x,)])
    (slots,) = graphs._captured.slots  # type: ignore[union-attr]
    assert all((len(slot.graphs["B"].copy_nodes) == 1) == is_changed for slot in slots)
    gradients = []
    for call in (graphs.callables[0], module):
        module.zero_grad()
        with graphs.step(4):
            for i in range(4):
                (call(x) * (i + 0.5)).backward(torch.randn(4, 8, device=device).fill_(i))
        gradients.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))


class FakeDriver(GraphDriver):
    """The used part of the driver; a call fails if ``refuses`` names it or the source's address."""

    def __init__(self) -> None:
        self.refuses: list[Any] = []
        self.calls: list[tuple[Any, ...]] = []
        self.bindings = SimpleNamespace(
            CUresult=SimpleNamespace(CUDA_SUCCESS=0),
            CUmemorytype=SimpleNamespace(CU_MEMORYTYPE_DEVICE="device"),
            CUDA_MEMCPY3D=SimpleNamespace,
            CUgraph=int,
            CUgraphExec=int,
            CUdeviceptr=int,
            cuCtxGetCurrent=lambda: (0, "context"),
            cuGraphGetRootNodes=lambda _graph, num: (0, ["a", "b"][:num], 2),
            cuGraphAddMemcpyNode=lambda *_: self._called("add", "node"),
            cuGraphAddDependencies=lambda _graph, sources, targets, *_: self._called(
                "edges", *zip(sources, targets, strict=True)
            )[:1],
            cuGraphNodeSetEnabled=lambda _exec, _node, is_on: self._called("enable", is_on)[:1],
            cuGraphExecMemcpyNodeSetParams=lambda _exec, _node, parameters, _context: self._called(
                parameters.srcDevice
            )[:1],
        )
        self._get_edges = lambda *_: (0, [], [], [], 0)
        self._add_edges = "cuGraphAddDependencies"

    def _called(self, name: Any, *values: Any) -> tuple[Any, ...]:
        self.calls.append((name, *values))
        return (1 if name in self.refuses else 0, *values)


def test_a_source_is_set_only_if_it_is_another_one() -> None:
    driver = FakeDriver()
    target = memory_of(torch.zeros(2))
    assert target is not None
    copy, none = add_copy_nodes(driver, 7, [target, None])
    assert none is None
    assert copy is not None
    copy.begin(8)
    assert driver.calls == [("add", "node"), ("edges", ("node", "a"), ("node", "b")), ("enable", 0)]
    driver.calls.clear()
    assert all(map(copy.read, (target.start, 300, 300, 400, target.start, target.start)))
    assert driver.calls == [(300,), ("enable", 1), (400,), ("enable", 0)]
    driver.calls.clear()
    driver.refuses = [500]  # memory of another kind: it is left to the host, and not asked again
    assert [*map(copy.read, (400, 500, 400, target.start))] == [True, False, False, True]
    assert driver.calls == [(400,), ("enable", 1), (500,), ("enable", 0)]
    driver.refuses = ["edges"]
    with pytest.raises(DamagedGraphError):
        add_copy_nodes(driver, 7, [target])


@pytest.mark.parametrize("num_read", [0, 20])
def test_the_host_copies_where_graphs_cannot(
    monkeypatch: pytest.MonkeyPatch, num_read: int
) -> None:
    """After ``num_read`` loads, no graph copies any more."""
    read, num_asked = RecordedCopy.read, 0

    def refusing(self: RecordedCopy, address: int) -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked <= num_read or address == self._target.start:
            return read(self, address)
        read(self, self._target.start)
        return False

    monkeypatch.setattr(RecordedCopy, "read", refusing)
    torch.manual_seed(0)
    module, inputs = nn.Linear(4, 4), torch.randn(5, 6, 3, 4)
    gradients: list[list[torch.Tensor]] = []
    graphs = ChunkGraphs([module], [2])
    for call in (graphs.callables[0], module):
        module.zero_grad()
        for step in inputs:
            with graphs.step(len(step)):
                for x in step:
                    (call(x) * x).sum().backward()
        gradients.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *gradients))
    assert num_asked > 40

"""Graphs begin with copies whose sources change between replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.layout import memory_of
from chunkgraph.graphs import AddressRange, CUDABackend, GraphBackend
from chunkgraph.graphs.copy_nodes import CopyNodes, CudaCopyNode
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver
from chunkgraph.graphs.recorded_graph import RecordedCopy


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
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    driver = GraphDriver.__new__(GraphDriver)
    with pytest.raises(RuntimeError, match="raw_cuda_graph_exec"):
        CopyNodes(driver, torch.zeros(3, dtype=torch.int32))


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


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def nodes(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> CopyNodes:
    monkeypatch.setattr(CopyNodes, "_try", lambda self, words: None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec", None, raising=False)
    return CopyNodes(driver, torch.zeros(3, dtype=torch.int32))


def added(nodes: CopyNodes, *targets: AddressRange | None) -> list[CudaCopyNode | None]:
    copies = nodes.add(7, targets)
    for copy in copies:
        if copy is not None:
            copy.begin(8)
    return list(copies)


def test_a_source_is_set_only_if_it_is_another_one(driver: FakeDriver, nodes: CopyNodes) -> None:
    copy, none = added(nodes, AddressRange(100, 108), None)
    assert none is None
    assert copy is not None
    assert driver.calls == [("add", "node"), ("edges", ("node", "a"), ("node", "b")), ("enable", 0)]
    driver.calls.clear()
    assert all(map(copy.read, (100, 300, 300, 400, 100, 100)))
    assert driver.calls == [(300,), ("enable", 1), (400,), ("enable", 0)]


def test_memory_that_the_driver_refuses_is_left_to_the_host(
    driver: FakeDriver, nodes: CopyNodes
) -> None:
    (copy,) = added(nodes, AddressRange(100, 108))
    assert copy is not None
    driver.calls.clear()
    driver.refuses = [300]
    with pytest.warns(UserWarning, match="SetParams failed") as warned:
        assert [*map(copy.read, (200, 300, 200, 100, 100))] == [True, False, False, True, True]
    assert len(warned) == 1
    assert driver.calls == [(200,), ("enable", 1), (300,), ("enable", 0)]
    driver.refuses = ["add"]
    with pytest.warns(UserWarning, match="AddMemcpyNode failed"):
        assert added(nodes, AddressRange(100, 108)) == [None]
    driver.refuses = ["edges"]
    with pytest.raises(DamagedGraphError):
        nodes.add(7, [AddressRange(100, 108)])


def test_the_host_copies_where_graphs_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gradients are copied by graphs, later ones and inputs are not."""
    num_read = 0

    def read(self: RecordedCopy, address: int) -> bool:
        nonlocal num_read
        num_read += 1
        is_copied = num_read < 20 or address == self.target.start
        self._source = address if is_copied else self.target.start
        return is_copied

    monkeypatch.setattr(RecordedCopy, "read", read)
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
    assert num_read > 40

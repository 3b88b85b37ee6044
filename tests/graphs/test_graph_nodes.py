"""Captured graphs get kernels instead of memsets, and begin with copies whose sources change."""

from __future__ import annotations

import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs
from chunkgraph.engine.layout import memory_of
from chunkgraph.errors import CaptureError
from chunkgraph.graphs import CUDABackend, GraphBackend
from chunkgraph.graphs.cuda import CUDAGraphHandle
from chunkgraph.graphs.graph_nodes import MAX_BYTES, GraphEditor
from chunkgraph.graphs.recorder.recorded_graph import RecordedCopy

OK, WRONG = 0, 1


class Node(int):
    """A handle as in the driver's bindings: a new object for the same node each time."""


class FakeDriver(ModuleType):
    """The used part of the CUDA driver's graph API; runs memsets and fills in order."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=OK)
    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_MEMSET="memset",
        CU_GRAPH_NODE_TYPE_MEM_ALLOC="alloc",
        CU_GRAPH_NODE_TYPE_MEM_FREE="free",
    )
    CUgraph = CUdeviceptr = int
    CUDA_KERNEL_NODE_PARAMS = CUDA_MEMSET_NODE_PARAMS = CUgraphEdgeData = SimpleNamespace

    def __init__(self, bindings: str, *, is_reversed: bool = False) -> None:
        super().__init__("cuda.bindings.driver")
        self.is_reversed = is_reversed
        if bindings == "cuda12.9":  # the plain functions know no kinds of edges; none may be called
            for name in ("NodeGetDependencies", "NodeGetDependentNodes", "AddDependencies"):
                setattr(self, f"cuGraph{name}_v2", getattr(self, f"cuGraph{name}"))
                setattr(self, f"cuGraph{name}", None)
        self.nodes: dict[int, tuple[str, Any]] = {}
        self.edges: list[tuple[int, int, Any]] = []
        self.refuses = False
        self._handles = itertools.count(100)

    def add(self, what: str, parameters: Any, *before: int, kind: Any = None) -> Node:
        node = Node(next(self._handles))
        self.nodes[node] = (what, parameters)
        self.edges += [(other, node, kind) for other in before]
        return node

    def order(self) -> list[tuple[str, Any]]:
        """Return the contents of the nodes, each after all nodes that it waits for."""
        left, done, contents = dict(self.nodes), set[int](), []
        while left:
            node = min(n for n in left if all(a in done for a, b, _ in self.edges if b == n))
            done.add(node)
            contents.append(left.pop(node))
        return contents

    def cuModuleLoadData(self, image: bytes) -> tuple[int, str]:  # noqa: N802
        assert image.endswith(b"\0")
        return OK, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[int, bytes]:  # noqa: N802
        return OK, name

    def cuGraphGetNodes(self, graph: int, num: int) -> tuple[int, list[Node], int]:  # noqa: N802
        nodes = sorted(self.nodes, reverse=self.is_reversed)[:num]
        return OK, [Node(n) for n in nodes], len(self.nodes)

    def cuGraphNodeGetType(self, node: Node) -> tuple[int, str]:  # noqa: N802
        return OK, self.nodes[node][0]

    def cuGraphMemsetNodeGetParams(self, node: Node) -> tuple[int, Any]:  # noqa: N802
        return OK, self.nodes[node][1]

    def cuGraphNodeGetDependencies(self, node: Node, num: int) -> tuple[Any, ...]:  # noqa: N802
        return self._neighbors([(a, kind) for a, b, kind in self.edges if b == node], num)

    def cuGraphNodeGetDependentNodes(self, node: Node, num: int) -> tuple[Any, ...]:  # noqa: N802
        return self._neighbors([(b, kind) for a, b, kind in self.edges if a == node], num)

    def _neighbors(self, found: list[tuple[int, Any]], num: int) -> tuple[Any, ...]:
        plain = SimpleNamespace(from_port=0, to_port=0, type=0)
        nodes = [Node(node) for node, _ in found[:num]]
        return OK, nodes, [kind or plain for _, kind in found[:num]], len(found)

    def cuGraphAddKernelNode(  # noqa: N802
        self, graph: int, before: list[int], num: int, parameters: Any
    ) -> tuple[int, Node]:
        assert num == len(before)
        return OK, self.add("fill", parameters, *before)

    def cuGraphAddDependencies(self, *args: Any) -> tuple[int]:  # noqa: N802
        if self.refuses:
            return (WRONG,)
        _, sources, targets, kinds, num = args
        assert kinds is None
        assert len(sources) == len(targets) == num
        assert all(int(n) in self.nodes for n in (*sources, *targets))
        self.edges += [(int(a), int(b), None) for a, b in zip(sources, targets, strict=True)]
        return (OK,)

    def cuGraphDestroyNode(self, node: Node) -> tuple[int]:  # noqa: N802
        del self.nodes[node]
        self.edges = [edge for edge in self.edges if node not in edge[:2]]
        return (OK,)


def memset(at: int, value: int = 0, *, width: int = 4, num: int = 1, height: int = 1) -> Any:
    return SimpleNamespace(dst=at, value=value, elementSize=width, width=num, height=height)


@pytest.fixture
def editor(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> GraphEditor:
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", package)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: None)
    return GraphEditor()


@pytest.fixture(params=["cuda13", "cuda12.9", "reversed"])
def driver(request: pytest.FixtureRequest) -> FakeDriver:
    """The driver promises no order of nodes."""
    if request.param == "reversed":
        return FakeDriver("cuda13", is_reversed=True)
    return FakeDriver(request.param)


def test_a_kernel_takes_the_place_of_each_memset(editor: GraphEditor, driver: FakeDriver) -> None:
    first = driver.add("kernel", "A")
    one = driver.add("memset", memset(64), first)
    two = driver.add("memset", memset(32, 7, width=1, num=600), one)
    both = driver.add("kernel", "B", two, one)
    driver.add("memset", memset(96, 5, width=2), both)  # nothing after it
    driver.add("kernel", "C", both)
    before = len(driver.edges)
    assert editor.replace_memsets(1) == 3
    order = driver.order()
    fills = [parameters for what, parameters in order if what == "fill"]
    assert [what for what, _ in order].count("memset") == 0
    launches = [(f.func, f.kernelParams[0], f.gridDimX, f.blockDimX) for f in fills]
    assert sorted(launches) == [
        (b"chunkgraph_fill_b16", (96, 5, 1), 1, 256),
        (b"chunkgraph_fill_b32", (64, 0, 1), 1, 256),
        (b"chunkgraph_fill_b8", (32, 7, 600), 3, 256),
    ]
    types = {tuple(map(ctypes.sizeof, f.kernelParams[1])) for f in fills}
    assert types == {(8, 4, 4)}  # as the parameters of the kernels
    names = [p if what == "kernel" else p.kernelParams[0][0] for what, p in order]
    assert [n for n in names if n != 96] == ["A", 64, 32, "B", "C"]
    assert names.index(96) > names.index("B")
    assert len(driver.edges) == before


def test_what_no_kernel_does_as_well_stays(editor: GraphEditor, driver: FakeDriver) -> None:
    nodes = [driver.add("memset", memset(0, width=4, num=MAX_BYTES // 4 + 1))]
    for unusual in (memset(0, height=2), memset(0, width=8), memset(0, num=0)):
        nodes.append(driver.add("memset", unusual, nodes[-1]))
    last = driver.add("memset", memset(0, width=4, num=MAX_BYTES // 4), nodes[-1])
    assert editor.replace_memsets(1) == 1
    assert set(driver.nodes) >= set(nodes)
    assert last not in driver.nodes
    (fill,) = [parameters for what, parameters in driver.order() if what == "fill"]
    assert fill.gridDimX * fill.blockDimX == MAX_BYTES // 4


def test_unusual_graphs_and_edges_are_left_alone(editor: GraphEditor, driver: FakeDriver) -> None:
    special = SimpleNamespace(from_port=0, to_port=0, type=1)
    first = driver.add("memset", memset(0), driver.add("kernel", "A"), kind=special)
    second = driver.add("memset", memset(4), first)
    driver.add("kernel", "B", second, kind=special)
    third = driver.add("memset", memset(8), second)
    assert editor.replace_memsets(1) == 1
    assert {first, second} <= set(driver.nodes)
    assert third not in driver.nodes
    driver.add("memset", memset(0), driver.add("alloc", None))
    assert editor.replace_memsets(1) == 0


class _Graph:
    """A graph of torch whose instantiation fails."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def capture_end(self) -> None:
        self.done.append("end")

    def raw_cuda_graph(self) -> int:
        return 1

    def instantiate(self) -> None:
        self.done.append("instantiate")
        raise torch.OutOfMemoryError("none left")

    def reset(self) -> None:
        self.done.append("reset")


def test_a_graph_that_cannot_be_made_is_freed(
    monkeypatch: pytest.MonkeyPatch, editor: GraphEditor, driver: FakeDriver
) -> None:
    driver.add("kernel", "B", driver.add("memset", memset(0)))
    for refuses, error, done in (
        (True, CaptureError, ["end", "reset"]),
        (False, torch.OutOfMemoryError, ["end", "instantiate", "reset"]),
    ):
        driver.refuses, graph = refuses, _Graph()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph, graph=graph: graph)
        handle = CUDAGraphHandle("graph", None, None, editor)  # type: ignore[arg-type]
        with pytest.raises(error, match="memset_kernels=False" if refuses else "none left"):
            handle.finish()
        assert graph.done == done
        assert handle.graph is None


@pytest.mark.gpu
def test_replays_write_what_memsets_wrote() -> None:
    from cuda.bindings import runtime

    results = []
    for uses_kernels in (True, False):
        backend = CUDABackend(memset_kernels=uses_kernels)
        assert backend.memsets_kept == ""
        x = torch.ones(4096, dtype=torch.int32, device=backend.device)
        with backend.capture("memsets", backend.new_pool("slot")) as graph:
            stream = torch.cuda.current_stream().cuda_stream
            seen = []
            for i, num_bytes in enumerate((4, 3, 1000, 16384)):
                (status,) = runtime.cudaMemsetAsync(x.data_ptr(), 17 + i, num_bytes, stream)
                assert status == runtime.cudaError_t.cudaSuccess
                seen.append(x.clone())
                x.add_(1)
        assert graph.num_memset_kernels == (4 if uses_kernels else 0)
        for _ in range(3):
            x.fill_(-1)
            graph.replay()
        results.append([x.tolist(), *(t.tolist() for t in seen)])
        graph.release()
    assert results[0] == results[1]
    assert results[0][1][:2] == [0x11111111, -1]


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


class CopyEditor(GraphEditor):
    """Record calls of the driver; one fails if ``refuses`` names it or the source's address."""

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
        self._add_dependencies = "cuGraphAddDependencies"

    def _called(self, name: Any, *values: Any) -> tuple[Any, ...]:
        self.calls.append((name, *values))
        return (1 if name in self.refuses else 0, *values)


def test_a_source_is_set_only_if_it_is_another_one() -> None:
    editor = CopyEditor()
    target = memory_of(torch.zeros(2))
    assert target is not None
    copy, none = editor.add_copies(7, [target, None])
    assert none is None
    assert copy is not None
    copy.begin(8)
    assert editor.calls == [("add", "node"), ("edges", ("node", "a"), ("node", "b")), ("enable", 0)]
    editor.calls.clear()
    assert all(map(copy.read, (target.start, 300, 300, 400, target.start, target.start)))
    assert editor.calls == [(300,), ("enable", 1), (400,), ("enable", 0)]
    editor.calls.clear()
    editor.refuses = [500]  # memory of another kind: it is left to the host, and not asked again
    assert [*map(copy.read, (400, 500, 400, target.start))] == [True, False, False, True]
    assert editor.calls == [(400,), ("enable", 1), (500,), ("enable", 0)]


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

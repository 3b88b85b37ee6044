"""Memsets of captured graphs become kernels, on GPUs and in a stand-in for the driver."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from chunkgraph.engine import CaptureOptions, Chunk, ChunkGraphs, arguments
from chunkgraph.graphs import CUDABackend, RecorderBackend
from chunkgraph.graphs.cuda import CUDAGraphHandle
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver
from chunkgraph.graphs.memset_nodes import MAX_BYTES, MemsetKernels

OK, WRONG, LOSSY = 0, 1, 2


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
    CUDA_KERNEL_NODE_PARAMS = CUDA_MEMSET_NODE_PARAMS = SimpleNamespace

    def __init__(self, bindings: str, *, is_reversed: bool = False) -> None:
        super().__init__("cuda.bindings.driver")
        self.has_kinds = bindings != "cuda12.0"
        self.is_reversed = is_reversed
        if (
            bindings == "cuda12.9"
        ):  # the plain functions know no kinds of edges; nothing may call them
            self.cuGraphGetEdges_v2, self.cuGraphGetEdges = self.cuGraphGetEdges, None  # type: ignore[method-assign,assignment]
            self.cuGraphAddDependencies_v2, self.cuGraphAddDependencies = (  # type: ignore[method-assign]
                self.cuGraphAddDependencies,
                None,  # type: ignore[assignment]
            )
        self.nodes: dict[int, tuple[str, Any]] = {}
        self.edges: list[tuple[int, int, Any]] = []
        self.refuses = ""
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

    def cuGraphGetEdges(self, graph: int, num: int) -> tuple[Any, ...]:  # noqa: N802
        if not self.has_kinds and any(kind for _, _, kind in self.edges):
            return LOSSY, [], [], 0
        plain = SimpleNamespace(from_port=0, to_port=0, type=0)
        kinds = ([kind or plain for _, _, kind in self.edges[:num]],) if self.has_kinds else ()
        sources = [Node(a) for a, _, _ in self.edges[:num]]
        targets = [Node(b) for _, b, _ in self.edges[:num]]
        return OK, sources, targets, *kinds, len(self.edges)

    def cuGraphAddKernelNode(  # noqa: N802
        self, graph: int, before: list[int], num: int, parameters: Any
    ) -> tuple[int, Node]:
        assert num == len(before)
        return OK, self.add("fill", parameters, *before)

    def cuGraphAddDependencies(self, *args: Any) -> tuple[int]:  # noqa: N802
        if "dependencies" in self.refuses:
            return (WRONG,)
        _, sources, targets, *kinds, num = args
        assert bool(kinds) == self.has_kinds
        assert len(sources) == len(targets) == num
        assert all(int(n) in self.nodes for n in (*sources, *targets))
        self.edges += [(int(a), int(b), None) for a, b in zip(sources, targets, strict=True)]
        return (OK,)

    def cuGraphDestroyNode(self, node: Node) -> tuple[int]:  # noqa: N802
        if self.refuses == "destroy after dependencies":
            return (WRONG,)
        del self.nodes[node]
        self.edges = [edge for edge in self.edges if node not in edge[:2]]
        return (OK,)


def memset(at: int, value: int = 0, *, width: int = 4, num: int = 1, height: int = 1) -> Any:
    return SimpleNamespace(dst=at, value=value, elementSize=width, width=num, height=height)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> MemsetKernels:
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", package)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: None)
    return MemsetKernels(GraphDriver())


@pytest.fixture(params=["cuda13", "cuda12.9", "cuda12.0", "reversed"])
def driver(request: pytest.FixtureRequest) -> FakeDriver:
    """The driver promises no order of nodes."""
    if request.param == "reversed":
        return FakeDriver("cuda13", is_reversed=True)
    return FakeDriver(request.param)


def test_a_kernel_takes_the_place_of_each_memset(
    kernels: MemsetKernels, driver: FakeDriver
) -> None:
    first = driver.add("kernel", "A")
    one = driver.add("memset", memset(64), first)
    two = driver.add("memset", memset(32, 7, width=1, num=600), one)
    both = driver.add("kernel", "B", two, one)
    driver.add("memset", memset(96, 5, width=2), both)  # nothing after it
    driver.add("kernel", "C", both)
    before = len(driver.edges)
    assert kernels.replace(1) == 3
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


def test_what_no_kernel_does_as_well_stays(kernels: MemsetKernels, driver: FakeDriver) -> None:
    nodes = [driver.add("memset", memset(0, width=4, num=MAX_BYTES // 4 + 1))]
    for unusual in (memset(0, height=2), memset(0, width=8), memset(0, num=0)):
        nodes.append(driver.add("memset", unusual, nodes[-1]))
    last = driver.add("memset", memset(0, width=4, num=MAX_BYTES // 4), nodes[-1])
    assert kernels.replace(1) == 1
    assert set(driver.nodes) >= set(nodes)
    assert last not in driver.nodes
    (fill,) = [parameters for what, parameters in driver.order() if what == "fill"]
    assert fill.gridDimX * fill.blockDimX == MAX_BYTES // 4


def test_a_graph_that_allocates_is_left_alone(kernels: MemsetKernels, driver: FakeDriver) -> None:
    driver.add("memset", memset(0), driver.add("alloc", None))
    with pytest.raises(RuntimeError, match="a graph that allocates memory"):
        kernels.replace(1)
    assert [what for what, _ in driver.order()] == ["alloc", "memset"]


@pytest.mark.parametrize("ports_and_type", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_edges_of_a_special_kind_are_left_alone(
    kernels: MemsetKernels, driver: FakeDriver, ports_and_type: tuple[int, int, int]
) -> None:
    source, target, kind = ports_and_type
    special = SimpleNamespace(from_port=source, to_port=target, type=kind)
    first = driver.add("memset", memset(0), driver.add("kernel", "A"), kind=special)
    second = driver.add("memset", memset(4), first)
    driver.add("kernel", "B", second, kind=special)
    third = driver.add("memset", memset(8), second)
    if driver.has_kinds:
        assert kernels.replace(1) == 1
    else:  # an API without kinds then returns no edges at all
        with pytest.raises(RuntimeError, match="cuGraphGetEdges failed"):
            kernels.replace(1)
    assert {first, second} <= set(driver.nodes)
    assert (third in driver.nodes) == (not driver.has_kinds)


def test_an_error_leaves_the_graph_as_it_was(kernels: MemsetKernels, driver: FakeDriver) -> None:
    driver.add("kernel", "B", driver.add("memset", memset(0), driver.add("kernel", "A")))
    before = driver.order()
    driver.refuses = "dependencies"
    with pytest.raises(RuntimeError, match="cuGraphAddDependencies"):
        kernels.replace(1)
    assert driver.order() == before
    driver.refuses = "destroy after dependencies"
    with pytest.raises(DamagedGraphError):
        kernels.replace(1)


class _Graph:
    """A graph of torch whose instantiation may fail."""

    def __init__(self, error: Exception | None) -> None:
        self.done: list[str] = []
        self._error = error

    def capture_end(self) -> None:
        self.done.append("end")

    def raw_cuda_graph(self) -> int:
        return 1

    def instantiate(self) -> None:
        self.done.append("instantiate")
        if self._error is not None:
            raise self._error

    def reset(self) -> None:
        self.done.append("reset")


def _handle(monkeypatch: pytest.MonkeyPatch, graph: _Graph, kernels: Any) -> CUDAGraphHandle:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda keep_graph: graph)
    driver = kernels._graphs
    return CUDAGraphHandle("graph", None, None, driver, kernels)  # type: ignore[arg-type]


def test_memsets_that_cannot_be_replaced_fail_no_capture(
    monkeypatch: pytest.MonkeyPatch, kernels: MemsetKernels, driver: FakeDriver
) -> None:
    driver.add("kernel", "B", driver.add("memset", memset(0)))
    driver.refuses = "dependencies"
    graph = _Graph(None)
    handle = _handle(monkeypatch, graph, kernels)
    handle.finish()
    assert graph.done == ["end", "instantiate"]
    assert "cuGraphAddDependencies" in handle.memsets_kept
    assert handle.num_memset_kernels == 0
    driver.refuses = "destroy after dependencies"
    graph = _Graph(None)
    handle = _handle(monkeypatch, graph, kernels)
    with pytest.raises(DamagedGraphError):
        handle.finish()
    assert graph.done == ["end", "reset"]
    assert handle.graph is None


def test_a_graph_that_cannot_be_made_is_freed(
    monkeypatch: pytest.MonkeyPatch, kernels: MemsetKernels, driver: FakeDriver
) -> None:
    driver.add("memset", memset(0))
    graph = _Graph(torch.OutOfMemoryError("none left"))
    handle = _handle(monkeypatch, graph, kernels)
    with pytest.raises(torch.OutOfMemoryError):
        handle.finish()
    assert graph.done == ["end", "instantiate", "reset"]
    assert handle.graph is None
    assert handle.memsets_kept == ""


@pytest.mark.parametrize("uses_kernels", [True, False])
def test_the_default_backend_follows_the_options(
    monkeypatch: pytest.MonkeyPatch, uses_kernels: bool
) -> None:
    backends: list[tuple[str, bool]] = []

    def cuda(device: torch.device, *, memset_kernels: bool) -> RecorderBackend:
        backends.append((str(device), memset_kernels))
        return RecorderBackend()

    monkeypatch.setattr(arguments, "CUDABackend", cuda)
    parameter: Any = SimpleNamespace(device=torch.device("cuda", 3))
    chunk = Chunk(forward=lambda x: x, parameters=(parameter,), label="chunk 0")
    options = CaptureOptions(memset_kernels=uses_kernels)
    with contextlib.suppress(AttributeError):  # it is no parameter
        ChunkGraphs([chunk], [1], options=options)
    assert backends == [("cuda:3", uses_kernels)]


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


@pytest.mark.gpu
def test_a_layer_norm_and_a_matrix_product_stay_equal_to_eager() -> None:
    """cuBLAS clears the counters of some of its kernels."""
    backend = CUDABackend()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.LayerNorm(2048), torch.nn.Linear(2048, 6144, bias=False))
    module.to(backend.device, torch.bfloat16)
    x = torch.randn(1024, 2048, device=backend.device, dtype=torch.bfloat16)
    with torch.no_grad(), backend.on_capture_stream():
        module(x)
    with torch.no_grad(), backend.capture("product", backend.new_pool("slot")) as graph:
        y = module(x)
    if not graph.num_memset_kernels:
        pytest.skip("this cuBLAS clears nothing for these products")
    for seed in range(5):
        x.copy_(torch.randn(1024, 2048, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(y, module(x))

"""Change a captured graph through the CUDA driver, before torch instantiates it.

**Kernels instead of small memsets.** Between two kernels of a graph the device needs about a third
of a microsecond. A memset node in between waits until the first kernel has drained, and the second
kernel waits until memory is flushed: some 6 us for four bytes (measured on H200s). cuBLAS and cuDNN
clear a counter with a memset before many of their kernels, six times per transformer layer and
microbatch.

**Copies whose sources the host chooses before each replay.** On a busy stream, starting a copy
takes the host 10 to 20 us. Changing the source of a copy that the graph contains takes 3, and
nothing if the source stays where it was (measured on an H100). The device takes as long as before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from chunkgraph.graphs.addresses import AddressRange

MAX_BYTES = 1 << 16
"""Size of the largest memset that is replaced; in a larger one, writing outlasts the wait."""

_THREADS = 256
# One element for each thread. sm_50 covers all GPUs that torch supports.
_PTX = """
.version 6.0
.target sm_50
.address_size 64
""" + "".join(
    f"""
.visible .entry chunkgraph_fill_b{bits}(
    .param .u64 start, .param .u32 value, .param .u32 count)
{{
    .reg .pred %beyond;
    .reg .b32 %block, %threads, %thread, %index, %count, %value;
    .reg .b64 %address, %offset;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %thread, %tid.x;
    mad.lo.u32 %index, %block, %threads, %thread;
    ld.param.u32 %count, [count];
    setp.ge.u32 %beyond, %index, %count;
    @%beyond ret;
    ld.param.u64 %address, [start];
    ld.param.u32 %value, [value];
    mul.wide.u32 %offset, %index, {bits // 8};
    add.u64 %address, %address, %offset;
    st.{kind} [%address], %value;
    ret;
}}
"""
    for bits, kind in ((8, "u8"), (16, "u16"), (32, "u32"))
)


class GraphEditor:
    """Change graphs that torch keeps (``keep_graph``), on the current device.

    The kernels stay loaded until the process ends, since changed graphs need them. An error of the
    driver is a RuntimeError, and leaves the graph partly changed: it must not run.

    Attributes:
        bindings: The module ``cuda.bindings.driver``.

    Raises:
        RuntimeError: This torch, or its CUDA bindings, cannot change graphs; the message names
            what is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver

            _ = driver.CUgraphEdgeData  # since CUDA 12.3
            torch.cuda.CUDAGraph(keep_graph=True)
        except (ImportError, AttributeError, TypeError) as error:
            raise RuntimeError(
                f"{error}; pip install --upgrade cuda-bindings (12.3 or later) and torch"
            ) from error
        self.bindings: Any = driver
        # Bindings of CUDA 12 have second functions, which support all kinds of edges.
        latest = "_v2" if hasattr(driver, "cuGraphAddDependencies_v2") else ""
        self._get_sources = f"cuGraphNodeGetDependencies{latest}"
        self._get_targets = f"cuGraphNodeGetDependentNodes{latest}"
        self._add_dependencies = f"cuGraphAddDependencies{latest}"
        module = self.call("cuModuleLoadData", _PTX.encode() + b"\0")
        self._fills = {
            width: self.call(
                "cuModuleGetFunction", module, f"chunkgraph_fill_b{8 * width}".encode()
            )
            for width in (1, 2, 4)
        }

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; return its results without the status."""
        status, *values = getattr(self.bindings, name)(*args)
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {status!r}")
        return values[0] if len(values) == 1 else tuple(values)

    def replace_memsets(self, graph: int) -> int:
        """Replace the small memsets of a graph; those of a graph that allocates memory must stay.

        Args:
            graph: A ``cudaGraph_t`` that is not instantiated yet, from
                `torch.cuda.CUDAGraph.raw_cuda_graph`.

        Returns:
            The number of replaced memsets.
        """
        handle, kinds = self.bindings.CUgraph(graph), self.bindings.CUgraphNodeType
        _, num_nodes = self.call("cuGraphGetNodes", handle, 0)
        nodes, _ = self.call("cuGraphGetNodes", handle, num_nodes)
        types = [self.call("cuGraphNodeGetType", node) for node in nodes]
        pairs = zip(nodes, types, strict=True)
        memsets = [n for n, kind in pairs if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET]
        allocating = {kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE}
        if not memsets or not allocating.isdisjoint(types):
            return 0
        num_replaced = 0
        for node in memsets:
            parameters = self._fill_for(self.call("cuGraphMemsetNodeGetParams", node))
            sources = self._neighbors(self._get_sources, node)
            targets = self._neighbors(self._get_targets, node)
            if parameters is None or sources is None or targets is None:
                continue
            kernel = self.call("cuGraphAddKernelNode", handle, sources, len(sources), parameters)
            self._add_edges(handle, kernel, targets)
            self.call("cuGraphDestroyNode", node)
            num_replaced += 1
        return num_replaced

    def add_copies(
        self, graph: int, targets: Sequence[AddressRange | None]
    ) -> tuple[CudaCopyNode | None, ...]:
        """Add a copy to each target before everything else in a graph.

        Args:
            graph: A ``cudaGraph_t`` that is not instantiated yet.
            targets: Memory of the current device; None adds nothing.

        Returns:
            The copies, which `CudaCopyNode.begin` must start; None for each None.
        """
        handle = self.bindings.CUgraph(graph)
        _, num_roots = self.call("cuGraphGetRootNodes", handle, 0)
        roots = self.call("cuGraphGetRootNodes", handle, num_roots)[0] if num_roots else []
        context = self.call("cuCtxGetCurrent")

        before: list[Any] = []  # one after the other: parallel copies start 25 us later (H200)

        def added(target: AddressRange) -> CudaCopyNode:
            parameters = self.bindings.CUDA_MEMCPY3D()
            memory = self.bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
            parameters.srcMemoryType = parameters.dstMemoryType = memory
            parameters.srcDevice = parameters.dstDevice = self.bindings.CUdeviceptr(target.start)
            parameters.WidthInBytes = target.end - target.start
            parameters.Height = parameters.Depth = 1
            node = self.call(
                "cuGraphAddMemcpyNode", handle, before, len(before), parameters, context
            )
            before[:] = [node]
            return CudaCopyNode(self, node, parameters, context)

        copies = tuple(None if target is None else added(target) for target in targets)
        for node in before:
            self._add_edges(handle, node, list(roots))
        return copies

    def _neighbors(self, query: str, node: Any) -> list[Any] | None:
        """Return the nodes before or after a node; None if an edge to one of them is special."""
        *_, num = self.call(query, node, 0)
        nodes, edges, _ = self.call(query, node, num) if num else ([], [], 0)
        is_special = any(e.from_port or e.to_port or int(e.type) for e in edges)
        return None if is_special else nodes

    def _add_edges(self, graph: Any, source: Any, targets: list[Any]) -> None:
        if targets:
            num = len(targets)
            self.call(self._add_dependencies, graph, [source] * num, targets, None, num)

    def _fill_for(self, memset: Any) -> Any | None:
        """Return the parameters of an equivalent kernel; None for a memset that stays."""
        width, size = int(memset.elementSize), int(memset.width)
        fits = 0 < width * size <= MAX_BYTES and memset.height <= 1
        if not fits or width not in self._fills:
            return None
        parameters = self.bindings.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = self._fills[width]
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = -(-size // _THREADS), 1, 1
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = _THREADS, 1, 1
        parameters.sharedMemBytes = 0
        parameters.kernelParams = (
            (int(memset.dst), int(memset.value), size),
            (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32),
        )
        return parameters


class CudaCopyNode:
    """A copy at the start of a CUDA graph. See `chunkgraph.graphs.contract.CopyNode`.

    Args:
        editor: Functions of the driver.
        node: The graph's node, which copies the target to itself.
        parameters: Parameters of the node.
        context: The CUDA context of the target.
    """

    def __init__(self, editor: GraphEditor, node: Any, parameters: Any, context: Any) -> None:
        self._editor, self._node, self._parameters = editor, node, parameters
        self._set_parameters = editor.bindings.cuGraphExecMemcpyNodeSetParams
        self._context = context
        self._target = self._source = int(parameters.dstDevice)
        self._executable: Any = None
        self._is_refused = False

    def begin(self, executable: int) -> None:
        """Take the instantiated graph, a ``cudaGraphExec_t``; copy nothing so far."""
        self._executable = self._editor.bindings.CUgraphExec(executable)
        self._enable(False)

    def end(self) -> None:
        """Forget the instantiated graph, which is freed next."""
        self._executable = None

    def read(self, address: int) -> bool:
        """See `chunkgraph.graphs.contract.CopyNode`.

        The driver may refuse memory of another kind than the target's. It is not asked again.
        """
        if address == self._source:
            return True
        if self._executable is None:
            raise RuntimeError("this copy's graph was released; it cannot be loaded")
        if address == self._target:
            self._enable(False)
        elif self._is_refused:
            return False
        else:
            self._parameters.srcDevice = address
            (status,) = self._set_parameters(
                self._executable, self._node, self._parameters, self._context
            )
            if status:
                self._is_refused = True
                self.read(self._target)
                return False
            if self._source == self._target:
                self._enable(True)
        self._source = address
        return True

    def _enable(self, is_enabled: bool) -> None:
        self._editor.call("cuGraphNodeSetEnabled", self._executable, self._node, int(is_enabled))

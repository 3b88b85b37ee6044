"""Replace small memsets of a captured graph by kernels.

Between two kernels of a graph the device needs about a third of a microsecond. A memset node in
between waits until the first kernel has drained, and the second kernel waits until memory is
flushed: some 6 us for four bytes (measured on H200s). cuBLAS and cuDNN clear a counter with a
memset before many of their kernels, six times per transformer layer and microbatch.
`torch.cuda.CUDAGraph` allows changes between capture and instantiation (``keep_graph=True``).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver

__all__ = ["MAX_BYTES", "MemsetKernels"]

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


class MemsetKernels:
    """Replace memset nodes of graphs on the current device.

    The kernels stay loaded until the process ends, since changed graphs need them.

    Args:
        driver: Functions of the driver.

    Raises:
        RuntimeError: The driver cannot change graphs.
    """

    def __init__(self, driver: GraphDriver) -> None:
        self._driver = driver.bindings
        self._call = driver.call
        self._graphs = driver
        module = self._call("cuModuleLoadData", _PTX.encode() + b"\0")
        self._functions = {
            width: self._call(
                "cuModuleGetFunction", module, f"chunkgraph_fill_b{8 * width}".encode()
            )
            for width in (1, 2, 4)
        }

    def replace(self, graph: int) -> int:
        """Replace the small memsets of a graph that is not instantiated yet.

        Args:
            graph: A ``cudaGraph_t``, from `torch.cuda.CUDAGraph.raw_cuda_graph`.

        Returns:
            The number of replaced memsets.

        Raises:
            RuntimeError: The driver cannot replace them; the graph still does the same work.
            DamagedGraphError: The driver failed and left the graph partly changed.
        """
        handle, kinds = self._driver.CUgraph(graph), self._driver.CUgraphNodeType
        _, num_nodes = self._call("cuGraphGetNodes", handle, 0)
        nodes, _ = self._call("cuGraphGetNodes", handle, num_nodes)
        types = [self._call("cuGraphNodeGetType", node) for node in nodes]
        pairs = zip(nodes, types, strict=True)
        memsets = [n for n, kind in pairs if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET]
        if not memsets:
            return 0
        allocating = {kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE}
        if not allocating.isdisjoint(types):
            raise RuntimeError("the driver cannot remove nodes of a graph that allocates memory")
        before, after, unusual = self._edges(handle)
        replaced: dict[int, Any] = {}
        for node in memsets:
            parameters = self._kernel_for(self._call("cuGraphMemsetNodeGetParams", node))
            if parameters is None or int(node) in unusual:
                continue
            replaced[int(node)] = self._put_in_place(
                handle,
                node,
                parameters,
                [replaced.get(int(other), other) for other in before[int(node)]],
                [replaced.get(int(other), other) for other in after[int(node)]],
            )
        return len(replaced)

    def _edges(self, graph: Any) -> tuple[dict[int, list[Any]], dict[int, list[Any]], set[int]]:
        """Return each node's predecessors and successors, and the nodes with special edges."""
        before: dict[int, list[Any]] = defaultdict(list)
        after: dict[int, list[Any]] = defaultdict(list)
        special: set[int] = set()
        sources, targets, kinds = self._graphs.edges(graph)
        for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
            before[int(target)].append(source)
            after[int(source)].append(target)
            if kinds and any((kinds[i].from_port, kinds[i].to_port, int(kinds[i].type))):
                special |= {int(source), int(target)}
        return before, after, special

    def _kernel_for(self, memset: Any) -> Any | None:
        """Return the parameters of an equivalent kernel; None for a memset that stays."""
        width, size = int(memset.elementSize), int(memset.width)
        fits = 0 < width * size <= MAX_BYTES and memset.height <= 1
        if not fits or width not in self._functions:
            return None
        parameters = self._driver.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = self._functions[width]
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = -(-size // _THREADS), 1, 1
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = _THREADS, 1, 1
        parameters.sharedMemBytes = 0
        parameters.kernelParams = (
            (int(memset.dst), int(memset.value), size),
            (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32),
        )
        return parameters

    def _put_in_place(
        self, graph: Any, node: Any, parameters: Any, before: list[Any], after: list[Any]
    ) -> Any:
        """Replace ``node`` by a kernel node with the same edges; return the kernel node.

        An error leaves the graph with the same work, except for DamagedGraphError.
        """
        kernel = self._call("cuGraphAddKernelNode", graph, before, len(before), parameters)
        try:
            self._graphs.add_edges(graph, [kernel] * len(after), after)
        except BaseException as error:
            try:
                self._call("cuGraphDestroyNode", kernel)
            except RuntimeError as second:
                raise DamagedGraphError(f"{error}; then {second}") from error
            raise
        self._call("cuGraphDestroyNode", node)
        return kernel

"""Let a captured graph begin with copies whose sources the host chooses before each replay.

On a busy stream, starting a copy takes the host 10 to 20 us. Changing the source of a copy that the
graph contains takes 3, and nothing if the source stays where it was (measured on an H100). The
device takes as long as before. `torch.cuda.CUDAGraph` allows changes between capture and
instantiation (``keep_graph=True``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chunkgraph.graphs.addresses import AddressRange
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver

__all__ = ["CudaCopyNode", "add_copy_nodes"]


class CudaCopyNode:
    """A copy at the start of a CUDA graph. See `chunkgraph.graphs.contract.CopyNode`.

    Args:
        driver: Functions of the driver.
        node: The graph's node, which copies the target to itself.
        parameters: Parameters of the node.
    """

    def __init__(self, driver: GraphDriver, node: Any, parameters: Any) -> None:
        self._driver, self._node, self._parameters = driver, node, parameters
        self._set_parameters = driver.bindings.cuGraphExecMemcpyNodeSetParams
        self._context = driver.call("cuCtxGetCurrent")
        self._target = self._source = int(parameters.dstDevice)
        self._executable: Any = None
        self._is_refused = False

    def begin(self, executable: int) -> None:
        """Take the instantiated graph, a ``cudaGraphExec_t``; copy nothing so far."""
        self._executable = self._driver.bindings.CUgraphExec(executable)
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
        self._driver.call("cuGraphNodeSetEnabled", self._executable, self._node, int(is_enabled))


def add_copy_nodes(
    driver: GraphDriver, graph: int, targets: Sequence[AddressRange | None]
) -> tuple[CudaCopyNode | None, ...]:
    """Add a copy to each target before everything else in a graph.

    Args:
        driver: Functions of the driver.
        graph: A ``cudaGraph_t`` that is not instantiated yet.
        targets: Memory of the current device; None adds nothing.

    Returns:
        The copies, which `CudaCopyNode.begin` must start; None for each None.

    Raises:
        DamagedGraphError: The driver failed and left the graph partly changed.
    """
    bindings, handle = driver.bindings, driver.bindings.CUgraph(graph)
    _, num_roots = driver.call("cuGraphGetRootNodes", handle, 0)
    roots = list(driver.call("cuGraphGetRootNodes", handle, num_roots)[0]) if num_roots else []

    def added(target: AddressRange) -> CudaCopyNode:
        parameters = bindings.CUDA_MEMCPY3D()
        memory = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
        parameters.srcMemoryType = parameters.dstMemoryType = memory
        parameters.srcDevice = parameters.dstDevice = bindings.CUdeviceptr(target.start)
        parameters.WidthInBytes = target.end - target.start
        parameters.Height = parameters.Depth = 1
        context = driver.call("cuCtxGetCurrent")
        node = driver.call("cuGraphAddMemcpyNode", handle, [], 0, parameters, context)
        driver.add_edges(handle, [node] * len(roots), roots)
        return CudaCopyNode(driver, node, parameters)

    try:
        return tuple(None if target is None else added(target) for target in targets)
    except RuntimeError as error:
        raise DamagedGraphError(str(error)) from error

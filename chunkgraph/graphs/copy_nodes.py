"""Let a captured graph begin with copies whose sources the host chooses before each replay.

On a busy stream, starting a copy takes the host 10 to 20 us. Changing the source of a copy that the
graph contains takes 3, and nothing if the source stays where it was (measured on an H100). The
device takes as long as before. `torch.cuda.CUDAGraph` allows changes between capture and
instantiation (``keep_graph=True``).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from chunkgraph.graphs.addresses import AddressRange
from chunkgraph.graphs.graph_driver import DamagedGraphError, GraphDriver

__all__ = ["CopyNodes", "CudaCopyNode", "warn_of_host_copies"]


def warn_of_host_copies(reason: str) -> None:
    """Warn that the host starts a copy, with the same results."""
    warnings.warn(
        "The host starts copies of inputs and output gradients that graphs could contain, which "
        f"takes some 10 us each ({reason}). memset_kernels=False silences this warning.",
        stacklevel=3,
    )


class CudaCopyNode:
    """A copy at the start of a CUDA graph. See `chunkgraph.graphs.contract.CopyNode`.

    Args:
        driver: Functions of the driver.
        node: The graph's node, which copies the target to itself.
        parameters: Parameters of the node.
        context: CUDA context of the device.
    """

    def __init__(self, driver: GraphDriver, node: Any, parameters: Any, context: Any) -> None:
        self._set_parameters = driver.bindings.cuGraphExecMemcpyNodeSetParams
        self._driver = driver
        self._node = node
        self._parameters = parameters
        self._context = context
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
            status = self._set_parameters(
                self._executable, self._node, self._parameters, self._context
            )[0]
            if status:
                self._is_refused = True
                self.read(self._target)
                warn_of_host_copies(f"cuGraphExecMemcpyNodeSetParams failed: {status!r}")
                return False
            if self._source == self._target:
                self._enable(True)
        self._source = address
        return True

    def _enable(self, is_enabled: bool) -> None:
        self._driver.call("cuGraphNodeSetEnabled", self._executable, self._node, int(is_enabled))


class CopyNodes:
    """Add copies to graphs on the current device.

    Args:
        driver: Functions of the driver.
        words: Int32 tensor [3] on the device, which a test graph writes.

    Raises:
        RuntimeError: This torch, or its CUDA bindings with this driver, cannot add them; the
            message names what is missing.
    """

    def __init__(self, driver: GraphDriver, words: torch.Tensor) -> None:
        if not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec"):
            raise RuntimeError(f"torch {torch.__version__} has no raw_cuda_graph_exec()")
        self._driver = driver
        self._try(words)

    def add(
        self, graph: int, targets: Sequence[AddressRange | None]
    ) -> tuple[CudaCopyNode | None, ...]:
        """Add a copy to each target, before everything else in a graph.

        Args:
            graph: A ``cudaGraph_t`` that is not instantiated yet.
            targets: Memory of the device; None adds nothing.

        Returns:
            The copies, which `CudaCopyNode.begin` must start; None for each None, and where the
            driver refuses the target's memory.

        Raises:
            DamagedGraphError: The driver failed and left the graph partly changed.
        """
        driver, bindings = self._driver, self._driver.bindings
        handle, context = bindings.CUgraph(graph), driver.call("cuCtxGetCurrent")
        _, num_roots = driver.call("cuGraphGetRootNodes", handle, 0)
        roots = list(driver.call("cuGraphGetRootNodes", handle, num_roots)[0]) if num_roots else []
        copies: list[CudaCopyNode | None] = []
        for target in targets:
            if target is None:
                copies.append(None)
                continue
            parameters = bindings.CUDA_MEMCPY3D()
            memory = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
            parameters.srcMemoryType = parameters.dstMemoryType = memory
            parameters.srcDevice = parameters.dstDevice = bindings.CUdeviceptr(target.start)
            parameters.WidthInBytes = target.end - target.start
            parameters.Height = parameters.Depth = 1
            node = self._node_before(roots, handle, parameters, context)
            copy = None if node is None else CudaCopyNode(driver, node, parameters, context)
            copies.append(copy)
        return tuple(copies)

    def _node_before(
        self, roots: list[Any], graph: Any, parameters: Any, context: Any
    ) -> Any | None:
        """Add a node that copies before all roots; return None if the driver refuses it."""
        driver = self._driver
        try:
            node = driver.call("cuGraphAddMemcpyNode", graph, [], 0, parameters, context)
        except RuntimeError as error:
            warn_of_host_copies(str(error))
            return None
        try:
            driver.add_edges(graph, [node] * len(roots), roots)
        except RuntimeError as error:
            raise DamagedGraphError(str(error)) from error
        return node

    def _try(self, words: torch.Tensor) -> None:
        """Run a graph of one copy, disabled, from one source and from another."""
        assert words.dtype == torch.int32
        assert words.numel() == 3
        words.copy_(torch.tensor([1, 2, 3]))
        start, size = words.data_ptr(), words.element_size()
        driver, executable, values = self._driver, None, []
        graph = driver.call("cuGraphCreate", 0)
        try:
            (copy,) = self.add(int(graph), [AddressRange(start, start + size)])
            assert copy is not None
            executable = driver.call("cuGraphInstantiate", graph, 0)
            copy.begin(int(executable))
            stream = torch.cuda.current_stream(words.device).cuda_stream
            for place in (0, 1, 2, 0):
                copy.read(start + place * size)
                driver.call("cuGraphLaunch", executable, stream)
                values.append(words[0].item())
        finally:
            if executable is not None:
                driver.call("cuGraphExecDestroy", executable)
            driver.call("cuGraphDestroy", graph)
        if values != [1, 2, 3, 3]:
            raise RuntimeError(f"a test graph copied {values} instead of [1, 2, 3, 3]")

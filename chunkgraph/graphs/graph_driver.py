"""The CUDA driver's functions that change captured graphs."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["DamagedGraphError", "GraphDriver"]


class DamagedGraphError(RuntimeError):
    """A graph is partly changed and must not run."""


class GraphDriver:
    """Call the driver through NVIDIA's bindings, on graphs that torch keeps (``keep_graph``).

    Attributes:
        bindings: The module ``cuda.bindings.driver``.

    Raises:
        RuntimeError: This torch, or its CUDA bindings, cannot change graphs; the message names
            what is missing.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise RuntimeError(
                f"cuda-bindings cannot be imported ({error}); pip install cuda-bindings"
            ) from error
        try:
            torch.cuda.CUDAGraph(keep_graph=True)
        except TypeError as error:
            raise RuntimeError(f"torch {torch.__version__} has no keep_graph=True") from error
        self.bindings: Any = driver
        # Bindings of CUDA 12 have a second pair of functions, which supports all kinds of edges.
        latest = "_v2" if hasattr(driver, "cuGraphGetEdges_v2") else ""
        self._get_edges = getattr(driver, f"cuGraphGetEdges{latest}")
        self._add_edges = f"cuGraphAddDependencies{latest}"

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; return its results without the status."""
        status, *values = getattr(self.bindings, name)(*args)
        self.check(name, status)
        return values[0] if len(values) == 1 else tuple(values)

    def check(self, name: str, status: Any) -> None:
        """Raise RuntimeError unless ``status`` is success."""
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed: {status!r}")

    def edges(self, graph: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the edges of a graph: sources, targets, and kinds (empty before CUDA 12.3)."""
        result = self._get_edges(graph, 0)
        if result[0] == self.bindings.CUresult.CUDA_SUCCESS and result[-1]:
            result = self._get_edges(graph, result[-1])
        # Before CUDA 12.3 edges have no kind, and the call fails if one of them is special.
        self.check("cuGraphGetEdges", result[0])
        sources, targets, *kinds, _ = result[1:]
        return sources, targets, kinds[0] if kinds else []

    def add_edges(self, graph: Any, sources: list[Any], targets: list[Any]) -> None:
        """Add plain edges to a graph."""
        if targets:
            names_kinds = len(self._get_edges(graph, 0)) > 4
            kinds = (None,) if names_kinds else ()
            self.call(self._add_edges, graph, sources, targets, *kinds, len(targets))

"""Keep alive the memory of Megatron that graphs use: cached tables and global buffers.

Megatron's rotary embeddings keep their tables under ``functools.lru_cache``. Attention and linear
layers work in global buffers and replace one when they need a larger one. A graph remembers
addresses, so this memory must outlive the graph, even after the cache drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from chunkgraph.megatron.core.access import watch_results
from chunkgraph.megatron.core.capture_flag import global_buffers

__all__ = ["GROWING_BUFFERS", "CachedTables"]

_GET = "get_cached_cos_sin"
GROWING_BUFFERS = ("cos_cached", "sin_cached")
"""The buffers that fused RoPE of multi-latent attention reads."""


class CachedTables:
    """Hold the results of cached forwards and the buffers that captured graphs use.

    Args:
        modules: All modules of the captured parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [m for m in modules if hasattr(type(m).forward, "cache_info")]
        # A module replaces its buffers by longer ones on demand, for example in an eager step.
        self._with_buffers = [m for m in self._modules if hasattr(m, _GET)]
        self._references: list[Any] = []

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the results of cached forwards inside, and Megatron's global buffers at the end.

        They are held until `release`, or until the next call of `hold`.
        """
        self.release()
        watched = [watch_results(m, _GET, self._hold_buffers) for m in self._with_buffers]
        handles = [module.register_forward_hook(self._hold) for module in self._modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for undo in watched:
                undo()
            self._references.extend(global_buffers())

    def release(self) -> None:
        """Drop the references; no graph may use the memory afterwards."""
        self._references.clear()

    def _hold_buffers(self, module: nn.Module) -> None:
        for name in GROWING_BUFFERS:
            self._hold(module, (), getattr(module, name))

    def _hold(self, _module: nn.Module, _args: Any, result: Any) -> None:
        if not any(result is reference for reference in self._references):
            self._references.append(result)

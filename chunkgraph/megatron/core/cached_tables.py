"""Memory of Megatron's own that graphs use: cached tables and global buffers.

Megatron's rotary embeddings keep their tables under ``functools.lru_cache``; attention and linear
layers work in global buffers, each replaced when a larger one is wanted. A graph remembers
addresses, so what it uses must outlive it, whatever else becomes of the cache.
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
"""What fused RoPE of multi-latent attention takes its numbers from."""


class CachedTables:
    """Holds what modules with a cached forward return while graphs are captured, and buffers.

    Args:
        modules: those of the captured parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [m for m in modules if hasattr(type(m).forward, "cache_info")]
        # A longer one takes its place as soon as it is wanted, such as by an eager step.
        self._with_buffers = [m for m in self._modules if hasattr(m, _GET)]
        self._held: list[Any] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, results of cached forwards are kept, and at the end Megatron's global buffers.

        They are let go by `release`, or the next time.
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
            self._held.extend(global_buffers())

    def release(self) -> None:
        """Let the memory go; no graph may use it any more."""
        self._held.clear()

    def _hold_buffers(self, module: nn.Module) -> None:
        for name in GROWING_BUFFERS:
            self._hold(module, (), getattr(module, name))

    def _hold(self, _module: nn.Module, _args: Any, result: Any) -> None:
        if not any(result is held for held in self._held):
            self._held.append(result)

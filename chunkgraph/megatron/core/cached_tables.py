"""Keep cached tables and global buffers of Megatron apart from the memory of graphs.

Megatron's rotary embeddings keep their tables under ``functools.lru_cache``, one cache for all
instances in the process. A table that is made inside a capture lies in the pool of one graph: other
graphs overwrite it, and without a replay nobody computes it. So it belongs to that graph alone, and
no cache may keep it. A table made outside of captures serves all graphs. They remember its address,
so it must outlive them, even after the cache drops it. The same holds for the global buffers in
which attention and linear layers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from chunkgraph.graphs import is_capturing
from chunkgraph.megatron.core.access import import_megatron, patch_attributes

__all__ = ["GROWING_BUFFERS", "CachedTables"]

_GET = "get_cached_cos_sin"
GROWING_BUFFERS = ("cos_cached", "sin_cached")
"""The buffers that fused RoPE of multi-latent attention reads."""


class CachedTables:
    """Hold the tables and buffers that captured graphs use.

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
        """Hold the tables that are used inside, and Megatron's global buffers at the end.

        They are held until `release`, or until the next call of `hold`.
        """
        self.release()
        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(patch_attributes(module, {"forward": self._cached(module)}))
            for module in self._with_buffers:
                stack.callback(patch_attributes(module, {_GET: self._watched(module)}))
            try:
                yield
            finally:
                for module in self._with_buffers:
                    self._hold_buffers(module)
                # The work buffers that Megatron's layers share; each exists after its first use.
                state = import_megatron("megatron.core.parallel_state")
                self._references.extend(state.get_global_memory_buffer().buffer.values())

    def release(self) -> None:
        """Drop the references; no graph may use the memory afterwards."""
        self._references.clear()

    def _cached(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward with an unbounded cache of tables made outside of captures."""
        forward = module.forward
        cache: Any = type(module).forward
        tables: dict[Any, Any] = {}
        self._references.append(tables)

        def cached(*args: Any, **kwargs: Any) -> Any:
            key = args, tuple(kwargs.items())
            if key not in tables:
                num_misses = cache.cache_info().misses
                table = forward(*args, **kwargs)
                if is_capturing() and cache.cache_info().misses != num_misses:
                    cache.cache_clear()
                    return table
                tables[key] = table
            return tables[key]

        return cached

    def _watched(self, module: nn.Module) -> Callable[..., Any]:
        """Return the module's method, which holds the buffers that it may replace."""
        get = getattr(module, _GET)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._hold_buffers(module)
            return get(*args, **kwargs)

        return watched

    def _hold_buffers(self, module: nn.Module) -> None:
        """Hold the module's buffers; the session removes those that a capture made."""
        self._references += [getattr(module, n) for n in GROWING_BUFFERS if hasattr(module, n)]

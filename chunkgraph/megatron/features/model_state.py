"""Support the state that Megatron keeps in Python for every model.

Megatron's rotary embeddings keep their tables under ``functools.lru_cache``, one cache for all
instances in the process. A table that is made inside a capture lies in the pool of one graph: other
graphs overwrite it, and without a replay nobody computes it. So it belongs to that graph alone, and
no cache may keep it. A table made outside of captures serves all graphs. They remember its address,
so it must outlive them, even after the cache drops it. The same holds for the global buffers in
which attention and linear layers work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from torch import nn

from chunkgraph.graphs import is_capturing
from chunkgraph.megatron.core.access import import_megatron, patch_attributes
from chunkgraph.megatron.core.capturing import (
    capture_flag,
    recomputing,
    same_attention,
    states_on_device,
    without_realtime_tests,
)
from chunkgraph.megatron.core.data_parallel import facts_of_delays, is_fully_sharded
from chunkgraph.megatron.core.random_state import preserve_rng, rng_is_graph_safe
from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.model_part import GROWING_BUFFERS, SCOPE_RULES
from chunkgraph.megatron.refusals import MODEL_RULES
from chunkgraph.megatron.site import Site

_GET = "get_cached_cos_sin"


class ModelState(Feature):
    """Handle random state, recomputation, cached tables, and Megatron's flag of a capture.

    Args:
        modules: The captured modules.
    """

    rules = (*MODEL_RULES, *SCOPE_RULES)

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._tables = CachedTables(modules)

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the facts about the model's wrappers and Megatron's random state."""
        return {
            "is_fully_sharded": any(map(is_fully_sharded, site.chunks)),
            "is_rng_graph_safe": rng_is_graph_safe(),
            **facts_of_delays(site.chunks),
        }

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self:
        """Apply to every model."""
        return cls([module for part in site.parts for module in part.modules])

    @contextmanager
    def around(self, work: Work) -> Iterator[object]:
        """Restore random state; set Megatron's flag of a capture, and hold tables that it reads.

        With the flag, eager passes of ``verify`` choose attention as a capture does, which must
        choose that of eager steps (`same_attention`); DDP's hooks stay inactive.
        """
        held: object = None
        with ExitStack() as stack:
            if work == "session":
                stack.enter_context(preserve_rng())
            if work == "capture":
                stack.enter_context(same_attention())
            if work != "session":
                stack.enter_context(capture_flag())
                stack.enter_context(recomputing())
            if work == "capture":
                held = stack.enter_context(self._tables.hold())
                stack.enter_context(states_on_device(self._modules))
                stack.enter_context(without_realtime_tests())
            yield held


class CachedTables:
    """Hold the tables and buffers that captured graphs use.

    Args:
        modules: All modules of the captured parts.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [m for m in modules if hasattr(type(m).forward, "cache_info")]
        # A module replaces its buffers by longer ones on demand, for example in an eager step.
        self._with_buffers = [m for m in self._modules if hasattr(m, _GET)]

    @contextmanager
    def hold(self) -> Iterator[list[Any]]:
        """Hold the tables that are used inside, and Megatron's global buffers at the end.

        Yields:
            What holds them: keep it as long as the graphs.
        """
        held: list[Any] = []
        with ExitStack() as stack:
            for module in self._modules:
                stack.callback(patch_attributes(module, {"forward": _cached(module, held)}))
            for module in self._with_buffers:
                stack.callback(patch_attributes(module, {_GET: _watched(module, held)}))
            try:
                yield held
            finally:
                for module in self._with_buffers:
                    held += _buffers(module)
                # The work buffers that Megatron's layers share; each exists after its first use.
                state = import_megatron("megatron.core.parallel_state")
                held += state.get_global_memory_buffer().buffer.values()


def _cached(module: nn.Module, held: list[Any]) -> Callable[..., Any]:
    """Return the forward with an unbounded cache of tables made outside of captures."""
    forward = module.forward
    cache: Any = type(module).forward
    tables: dict[Any, Any] = {}
    held.append(tables)

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


def _watched(module: nn.Module, held: list[Any]) -> Callable[..., Any]:
    """Return the module's method, which holds the buffers that it may replace."""
    get = getattr(module, _GET)

    def watched(*args: Any, **kwargs: Any) -> Any:
        held.extend(_buffers(module))
        return get(*args, **kwargs)

    return watched


def _buffers(module: nn.Module) -> list[Any]:
    """Return the module's buffers; the session removes those that a capture made."""
    return [getattr(module, n) for n in GROWING_BUFFERS if hasattr(module, n)]

"""Support the state that Megatron keeps in Python for every model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from torch import nn

from chunkgraph.megatron.core.cached_tables import CachedTables
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
from chunkgraph.megatron.model_part import SCOPE_RULES
from chunkgraph.megatron.refusals import MODEL_RULES
from chunkgraph.megatron.site import Site

__all__ = ["ModelState"]


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
    def around(self, work: Work) -> Iterator[None]:
        """Restore random state; set Megatron's flag of a capture, and hold tables that it reads.

        Eager passes of ``verify`` choose attention as in a capture; DDP's hooks stay inactive.
        """
        with ExitStack() as stack:
            if work == "session":
                stack.enter_context(preserve_rng())
            if work == "verify":
                stack.enter_context(same_attention())
            if work != "session":
                stack.enter_context(capture_flag())
                stack.enter_context(recomputing())
            if work == "capture":
                stack.enter_context(self._tables.hold())
                stack.enter_context(states_on_device(self._modules))
                stack.enter_context(without_realtime_tests())
            yield

    def release(self) -> None:
        """Release the cached tables."""
        self._tables.release()

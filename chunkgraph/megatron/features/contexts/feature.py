"""The feature of models whose context-parallel size changes from microbatch to microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Self

from chunkgraph.megatron.feature import Feature, Work
from chunkgraph.megatron.features.contexts.attention import refuse_without_groups
from chunkgraph.megatron.features.contexts.groups import (
    ContextGroups,
    HeldGroups,
)
from chunkgraph.megatron.features.packing.params import needs_tokens_in_pieces
from chunkgraph.megatron.rules.contexts import CONTEXT_RULES
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.step import Step
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.engine import ChunkGraphs
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["Contexts"]


class Contexts(Feature):
    """Context parallelism with a size for each microbatch.

    Args:
        site: the model's site.
        groups: this rank's groups, one of each size.
    """

    rules = (
        *CONTEXT_RULES,
        Rule(
            "context_parallel_sizes lengths_in_pipeline: Megatron's schedule receives "
            "microbatches of one length; leave the lengths out"
        ),
        Rule(
            "context_parallel_sizes lengths_of_experts: ranks that share experts exchange buffers "
            "of one size; leave the lengths out"
        ),
    )

    def __init__(self, site: Site, groups: ContextGroups) -> None:
        self._groups = groups
        self._held = HeldGroups([part.module for part in site.parts])
        self._engine: ChunkGraphs | None = None

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the sizes, and whether a pipeline or experts would get several lengths."""
        banks = site.feature_options["packing"]
        if banks is None or banks.limits is None:
            return {}
        has_lengths = len({bank.num_tokens for bank in banks.keys}) > 1
        return {
            "context_parallel_sizes": tuple(banks.limits.group_sizes),
            "lengths_in_pipeline": has_lengths and site.place.pipeline_size > 1,
            "lengths_of_experts": has_lengths and site.shares_experts,
        }

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse a model that `follow_groups` has not prepared; warn of empty pieces.

        Raises:
            ConfigError: see `refuse_without_groups`.
        """
        banks, config, place = site.feature_options["packing"], site.config, site.place
        if banks is None or banks.groups is None:
            return
        refuse_without_groups(site.chunks, banks.groups)
        if needs_tokens_in_pieces(site.chunks, config, banks.limits):
            warnings.warn(
                f"rank {place.rank}: heads share keys (num_query_groups) and context-parallel "
                "ranks share documents. Short documents have pieces without a token. For the keys "
                "of such pieces, Transformer Engine's attention may return uninitialized memory "
                "as gradients (its issue 2448), in eager training too, so graphs and eager can "
                "differ. Count padding as tokens: ContextLimits(..., counts_padding=True).",
                stacklevel=3,
            )

    @classmethod
    def of(cls, site: Site, _undo: ExitStack) -> Self | None:
        """Return the feature if the banks have context-parallel groups, else None."""
        banks = site.feature_options["packing"]
        groups = None if banks is None else banks.groups
        return None if groups is None else cls(site, groups)

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Keep the groups open as long as graphs hold collectives of them."""
        self._engine = graphs.engine
        self._groups.hold(graphs.engine)

    def around(self, work: Work) -> AbstractContextManager[None]:
        """Restore the modules' groups after a capture."""
        return self._held.capturing() if work == "capture" else nullcontext()

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Restore, after a step, the groups that modules had before it."""
        with self._held.put_back(is_replayed=step.is_replayed):
            yield

"""Context parallelism whose size changes from microbatch to microbatch: a bank for each size."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from chunkgraph.megatron.features.contexts.attention import refuse_without_groups
from chunkgraph.megatron.features.contexts.banks import ContextBanks
from chunkgraph.megatron.features.contexts.groups import HeldGroups, capturing_banks
from chunkgraph.megatron.features.contexts.key import digest_of_plan
from chunkgraph.megatron.features.contexts.steps import StepContexts
from chunkgraph.megatron.features.packing.attention_limits import (
    needs_tokens_in_pieces,
    refuse_for_layers,
)
from chunkgraph.megatron.features.packing.offset_cutter import OffsetCutter
from chunkgraph.megatron.features.packing.params import refuse_other_length
from chunkgraph.megatron.site import Site
from chunkgraph.megatron.step import Step, StepInputs, StepPlan, StepPlanner
from chunkgraph.settings.contexts import CONTEXT_RULES
from chunkgraph.settings.rule import Rule

if TYPE_CHECKING:
    from chunkgraph.megatron.attached import MegatronChunkGraphs

__all__ = ["Contexts"]


class Contexts(OffsetCutter, StepPlanner):
    """Microbatches with a context-parallel size each, which every training step is given.

    Args:
        site: of the model.
        banks: of this rank.
    """

    rules = (
        *CONTEXT_RULES,
        Rule(
            "context_parallel_sizes lengths_in_pipeline: Megatron's schedule receives "
            "microbatches of one length; leave the lengths out"
        ),
        Rule(
            "context_parallel_sizes lengths_of_experts: ranks that share experts send each other "
            "the same room; leave the lengths out"
        ),
    )
    inputs = ("contexts",)
    drops_failed = True

    def __init__(self, site: Site, banks: ContextBanks) -> None:
        has_fewer = banks.has_fewer_sequences
        super().__init__(banks.with_offsets_of if has_fewer else None, len(site.parts))
        self.keys = banks.keys
        self.derive = banks.derive
        self._banks = banks
        self._device = site.device
        self._groups = HeldGroups([part.module for part in site.parts])
        self._steps = StepContexts(banks, self._misfit_of, site.place.rank, site.agree)

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return the sizes, and who would meet microbatches of several lengths."""
        banks = site.packing
        if not isinstance(banks, ContextBanks):
            return {}
        has_lengths = len({key.num_tokens for key in banks.keys}) > 1
        return {
            "context_parallel_sizes": tuple(banks.limits.group_sizes),
            "lengths_in_pipeline": has_lengths and site.place.pipeline_size > 1,
            "lengths_of_experts": has_lengths and site.shares_experts,
        }

    @classmethod
    def check(cls, site: Site) -> None:
        """Refuse a model that attention cannot be given the group of each microbatch in."""
        contexts, config, place = site.packing, site.config, site.place
        if not isinstance(contexts, ContextBanks):
            return
        refuse_for_layers(site.chunks, config, contexts.largest_shape, site.device)
        refuse_without_groups(site.chunks, contexts.groups)
        if needs_tokens_in_pieces(site.chunks, config, contexts.limits):
            warnings.warn(
                f"rank {place.rank}: heads share keys (num_query_groups) and documents are shared "
                "by context-parallel ranks. Of short ones some pieces hold no token, whose keys "
                "Transformer Engine's attention may give gradients of memory that nobody wrote "
                "(its issue 2448), in eager training too; then graphs do not equal it. Count "
                "padding as tokens: ContextLimits(..., counts_padding=True).",
                stacklevel=3,
            )

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply to models that are attached with banks of context-parallel sizes."""
        return cls(site, site.packing) if isinstance(site.packing, ContextBanks) else None

    def planner(self) -> StepPlanner:
        """Return one for each size, length and number of sequences."""
        return self

    def bind(self, graphs: MegatronChunkGraphs) -> None:
        """Keep the groups open while there are graphs of them."""
        super().bind(graphs)
        self._banks.groups.hold(graphs.engine)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Set up communicators before a capture, and put groups back after it."""
        assert self._engine is not None
        with capturing_banks(
            self._banks.groups,
            self._groups,
            self._device,
            are_used_before=bool(self._engine.num_warmup_passes),
        ):
            yield

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Give modules back, after a run, the group that they had before it."""
        with self._groups.put_back(is_replayed=step.is_replayed), super().step(step):
            yield

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Take the bank of each microbatch that was given or announced."""
        refuse_other_length(schedule)
        steps, num_microbatches = self._steps, schedule["num_microbatches"]
        misfit, banks = steps.begin(inputs.contexts, inputs.misfit, num_microbatches)
        digest = digest_of_plan(banks)
        return StepPlan(misfit, steps.misfit, banks, digest, cut_for=banks)

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Remember the banks of the next step."""
        misfit = self._steps.announced(inputs.contexts, inputs.misfit)
        return misfit, digest_of_plan(inputs.contexts)

    def withdraw(self) -> None:
        """Forget the banks of the next step."""
        self._steps.withdraw()

    def name(self, key: Hashable) -> str:
        """Name a bank by its size, tokens and sequences."""
        return str(key)

    def _misfit_of(self, banks: Any) -> str:
        assert self._engine is not None
        return self._engine.misfit_of(banks)

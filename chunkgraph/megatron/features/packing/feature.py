"""Packed sequences of fixed shapes: a bank for each length and number of sequences."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from chunkgraph.megatron.core.gloo_agreement import Maximum
from chunkgraph.megatron.features.packing.attention_limits import (
    needs_tokens_in_pieces,
    refuse_for_layers,
)
from chunkgraph.megatron.features.packing.banks import Buckets
from chunkgraph.megatron.features.packing.offset_cutter import OffsetCutter
from chunkgraph.megatron.features.packing.options import PackingOptions
from chunkgraph.megatron.features.packing.params import (
    refuse_other_context,
    refuse_other_length,
    refuse_predictions_over_padding,
)
from chunkgraph.megatron.features.packing.steps import StepPackings
from chunkgraph.megatron.site import Site, new_agreement
from chunkgraph.megatron.step import StepInputs, StepPlan, StepPlanner

__all__ = ["Packing"]


class Packing(OffsetCutter, StepPlanner):
    """Microbatches of documents, whose lengths every training step is given.

    Args:
        site: of the model.
        steps: what its steps are given.
    """

    inputs = ("packings", "buckets")

    def __init__(self, site: Site, steps: StepPackings) -> None:
        self.buckets = buckets = steps.buckets
        has_fewer = buckets.has_fewer_sequences
        super().__init__(buckets.with_offsets_of if has_fewer else None, len(site.parts))
        self.keys = buckets.banks
        self.derive = buckets.derive
        self.shapes = buckets.shapes
        self.all_shapes = buckets.all_shapes
        self._steps = steps
        self._agrees_on_buckets = len(buckets.keys) > 1
        self._agree: Maximum | None = None

    @classmethod
    def check(cls, site: Site) -> None:
        """Refuse a shape that the model's ranks or layers cannot take."""
        if isinstance(site.packing, PackingOptions):
            shape = site.packing.shape
            refuse_other_context(shape, site.config)
            refuse_predictions_over_padding(shape, site.config)
            refuse_for_layers(site.chunks, site.config, shape, site.device)

    @classmethod
    def of(cls, site: Site) -> Self | None:
        """Apply to models that are attached with fixed shapes; ranks compare them."""
        packing, config = site.packing, site.config
        if not isinstance(packing, PackingOptions):
            return None
        steps = StepPackings(
            Buckets.of_model(packing.shape, packing.buckets, packing.seq_counts, config),
            site.place.rank,
            site.agree,
            needs_buckets=bool(getattr(config, "num_moe_experts", None)) and site.shares_experts,
            fills_rows=packing.fills_rows,
            needs_tokens=needs_tokens_in_pieces(site.chunks, config),
        )
        return cls(site, steps)

    def install(self, undo: ExitStack) -> None:
        """Make what ranks agree on buckets through."""
        if self._agrees_on_buckets:
            # Not the engine's: it asks ahead of steps, on some ranks earlier than on others.
            self._agree = new_agreement(undo)

    def planner(self) -> StepPlanner:
        """Return one for each length and number of sequences."""
        return self

    def plan(self, inputs: StepInputs, schedule: Mapping[str, Any]) -> StepPlan:
        """Choose the bank of each microbatch, or take those that were announced."""
        refuse_other_length(schedule)
        steps, num_microbatches = self._steps, schedule["num_microbatches"]
        misfit = steps.begin(inputs.packings, inputs.misfit, num_microbatches, inputs.buckets)
        has_banks, has_buckets = len(self.keys) > 1, len(self.buckets.keys) > 1
        return StepPlan(
            misfit,
            steps.misfit,
            steps.banks if has_banks else None,
            rows=steps.rows(schedule.get("seq_length")) if has_buckets else None,
            cut_for=steps.cut_for if has_banks else (),
        )

    def announce(self, inputs: StepInputs) -> tuple[str, int]:
        """Remember the documents of the next step, and choose their banks."""
        if inputs.packings is None:
            return super().announce(inputs)
        return self._steps.announced(inputs.packings, inputs.misfit, inputs.buckets), 0

    def withdraw(self) -> None:
        """Forget the documents of the next step."""
        self._steps.withdraw()

    def agree_on_buckets(self, packings: Sequence[Sequence[int]]) -> list[int]:
        """Choose the smallest bucket that holds each microbatch on every rank."""
        return self.buckets.choose(packings, self._agree)

    def name(self, key: Hashable) -> str:
        """Name a bank by its tokens and sequences, if there are several."""
        return self.buckets.name(key) if len(self.keys) > 1 else ""

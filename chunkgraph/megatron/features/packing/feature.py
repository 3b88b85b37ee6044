"""Packed sequences: a bank for each context-parallel size, length and number of sequences."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from chunkgraph.megatron.features.packing.offset_cutter import OffsetCutter
from chunkgraph.megatron.features.packing.params import (
    needs_tokens_in_pieces,
    refuse_other_context,
    refuse_predictions_over_padding,
)
from chunkgraph.megatron.features.packing.steps import StepPlans
from chunkgraph.megatron.site import Site, new_agreement

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from chunkgraph.megatron.features.packing.banks import PackedBanks

__all__ = ["Packing"]


class Packing(OffsetCutter):
    """Microbatches of documents; every training step receives their lengths or banks.

    Args:
        site: The site of a model with packed shapes.

    Attributes:
        planner: The plans of this rank's steps.
    """

    planner: StepPlans

    def __init__(self, site: Site) -> None:
        banks: PackedBanks = site.feature_options["packing"]
        super().__init__(banks, len(site.parts))
        has_experts = bool(getattr(site.config, "num_moe_experts", None))
        self.planner = StepPlans(
            banks,
            site.place.rank,
            site.agree,
            missing_graphs=self._missing_graphs,
            needs_buckets=has_experts and site.shares_experts,
            needs_tokens=needs_tokens_in_pieces(site.chunks, site.config),
        )

    @classmethod
    def facts(cls, site: Site) -> Mapping[str, object]:
        """Return whether sequences are packed, and whether rows may hold no token."""
        banks = site.feature_options["packing"]
        return {
            "packed": banks is not None,
            "pads_rows": banks is not None and not banks.fills_rows,
        }

    @classmethod
    def prepare(cls, site: Site, _undo: ExitStack) -> None:
        """Refuse shapes that the model's ranks or layers do not support."""
        banks = site.feature_options["packing"]
        if banks is None:
            return
        shape = banks.largest_shape
        if banks.groups is None:
            refuse_other_context(shape, site.config)
            refuse_predictions_over_padding(shape, site.config)

    @classmethod
    def of(cls, site: Site, undo: ExitStack) -> Self | None:
        """Return the feature for attachments with packed shapes, which ranks compare."""
        if site.feature_options["packing"] is None:
            return None
        packing = cls(site)
        if packing.planner.has_lengths:
            # Not the engine's: it communicates ahead of steps, and not on all ranks at once.
            packing.planner.agree_on_rows = new_agreement(undo)
        return packing

    def _missing_graphs(self, banks: Sequence[Hashable]) -> str:
        assert self._engine is not None
        return self._engine.misfit_of(banks)

"""The numbers that select one schedule out of a family."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelineShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """Sizes of one step of one pipeline.

    Attributes:
        num_ranks: Pipeline-parallel size.
        num_microbatches: Microbatches in the step.
        num_chunks: Model chunks on each rank (the virtual pipeline size).
        group_size: Consecutive microbatches run on one chunk before the next chunk has its turn
            (Megatron's ``microbatch_group_size_per_vp_stage``); None where chunks do not
            interleave.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    group_size: int | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    @property
    def turn_size(self) -> int:
        """The group size, ``num_ranks`` where it is None."""
        return self.num_ranks if self.group_size is None else self.group_size

"""The sizes that select one schedule of a family."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PipelineShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape:
    """Sizes of one step of one pipeline.

    Attributes:
        num_ranks: pipeline-parallel size.
        num_microbatches: microbatches of the step.
        num_chunks: model chunks per rank (the virtual pipeline size).
        group_size: consecutive microbatches that one chunk runs before the next chunk has its turn
            (Megatron's ``microbatch_group_size_per_vp_stage``); None if chunks do not interleave.
    """

    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    group_size: int | None = None

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    @property
    def turn_size(self) -> int:
        """Return the group size; ``num_ranks`` if it is None."""
        return self.num_ranks if self.group_size is None else self.group_size

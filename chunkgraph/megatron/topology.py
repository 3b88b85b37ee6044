"""`PipelinePlace`: this rank's place in Megatron's pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from chunkgraph.errors import ConfigError
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.schedules import stage_of
from chunkgraph.slots import plan_slots

__all__ = ["PipelinePlace"]


@dataclass(frozen=True)
class PipelinePlace:
    """This rank's place in the pipeline.

    Attributes:
        rank: Global rank.
        pipeline_rank: Rank in the pipeline-parallel group.
        pipeline_size: Number of ranks in that group.
        num_chunks: Number of model chunks on this rank.
        group_size: Number of microbatches that a chunk processes before the next chunk's turn.
    """

    rank: int
    pipeline_rank: int
    pipeline_size: int
    num_chunks: int
    group_size: int

    @classmethod
    def current(cls, num_chunks: int, config: Any) -> PipelinePlace:
        """Return this rank's place according to Megatron's parallel state.

        Raises:
            ConfigError: The model parallel groups are not initialized.
        """
        state = import_megatron("megatron.core.parallel_state")
        if not state.model_parallel_is_initialized():
            raise ConfigError(
                "Megatron's model parallel groups are not set up. Call "
                "parallel_state.initialize_model_parallel() before attach()."
            )
        size = state.get_pipeline_model_parallel_world_size()
        return cls(
            rank=dist.get_rank(),
            pipeline_rank=state.get_pipeline_model_parallel_rank(),
            pipeline_size=size,
            num_chunks=num_chunks,
            group_size=getattr(config, "microbatch_group_size_per_vp_stage", None) or size,
        )

    def stage(self, chunk: int) -> int:
        """Return the global pipeline stage of a chunk of this rank."""
        return stage_of(self.pipeline_rank, chunk, self.pipeline_size)

    def label(self, chunk: int) -> str:
        """Return the name of a chunk of this rank in errors."""
        return f"rank {self.rank}, pipeline stage {self.stage(chunk)}, chunk {chunk}"

    def num_slots(self, *, are_shared: bool = False) -> tuple[int, ...]:
        """Return the slots that each chunk needs for any number of microbatches.

        Args:
            are_shared: Whether all chunks share their slots.
        """
        plan = plan_slots(
            self.pipeline_size, self.num_chunks, self.group_size, rank=self.pipeline_rank
        )
        if are_shared:
            return (plan.peak_in_flight,) * self.num_chunks
        return plan.slots_per_chunk

"""This rank's place in Megatron's pipeline, and the schedule, by name or from a file."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.rules.features import SCHEDULE_RULES
from chunkgraph.schedules import (
    Schedule,
    build_schedule,
    check_counts,
    get_family,
    read_matching_schedule,
    stage_of,
)
from chunkgraph.settings.rule import Facts, check
from chunkgraph.settings.words import PROGRAM
from chunkgraph.slots import plan_schedule, plan_slots


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule for one rank of Megatron's pipeline.

    Attributes:
        name: A name in `chunkgraph.schedules.list_schedules`, or a CSV file of actions.
        place: The rank's place.
        file: The schedule of the file; it has one number of microbatches. None for a name.
    """

    name: str
    place: PipelinePlace
    file: Schedule | None = None

    @classmethod
    def of(cls, name: str, place: PipelinePlace) -> PipelineSchedule:
        """Look a schedule up, or read it.

        Raises:
            ConfigError: There is no such schedule, or it does not match Megatron's stages.
            ScheduleError: The file holds no valid schedule.
        """
        check(SCHEDULE_RULES, Facts({"schedule": name}.get, PROGRAM), "This schedule cannot run:")
        file = read_matching_schedule(name, place.pipeline_size, place.num_chunks)
        return cls(name, place, file)

    def build(self, num_microbatches: int) -> Schedule:
        """Build the schedule of a step.

        Raises:
            ConfigError: The file is for another number of microbatches.
            TopologyError: The schedule does not take this number.
        """
        if self.file is None:
            place = self.place
            return build_schedule(
                self.name,
                num_ranks=place.pipeline_size,
                num_chunks=place.num_chunks,
                num_microbatches=num_microbatches,
                group_size=place.group_size,
            )
        check_counts(self.file, [num_microbatches], "the batch size")
        return self.file

    def __str__(self) -> str:
        """Return the name, or a digest of a file's actions."""
        if self.file is None:
            return self.name
        return f"a file with the digest {zlib.crc32(self.file.to_csv().encode()):08x}"

    @property
    def splits_backward(self) -> bool:
        """Return whether backwards are split into input and weight gradients."""
        if self.file is not None:
            return self.file.splits_backward
        return get_family(self.name).splits_backward


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
        """Return this rank's place according to Megatron's parallel state."""
        state = import_megatron("megatron.core.parallel_state")
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

    def num_slots(
        self, schedule: PipelineSchedule | None = None, *, are_shared: bool = False
    ) -> tuple[int, ...]:
        """Return the slots that each chunk needs for any number of microbatches.

        Args:
            schedule: The schedule of training steps; None for Megatron's own.
            are_shared: Whether all chunks share their slots.
        """
        if schedule is not None and schedule.file is not None:
            plan = plan_schedule(schedule.file, self.pipeline_rank)
        else:
            plan = plan_slots(
                self.pipeline_size,
                self.num_chunks,
                self.group_size,
                rank=self.pipeline_rank,
                schedule="auto" if schedule is None else schedule.name,
            )
        return (plan.peak_in_flight,) * self.num_chunks if are_shared else plan.slots_per_chunk

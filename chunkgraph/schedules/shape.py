"""The sizes of a step, the placement of its stages, and how many microbatches a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


@dataclass(frozen=True, slots=True)
class InFlight:
    """Largest numbers of microbatches in flight on one rank.

    Attributes:
        per_chunk: the peak of each chunk; chunks may peak at different times.
        together: the peak of the sum over chunks, at most the sum of ``per_chunk``.
    """

    per_chunk: tuple[int, ...]
    together: int


class Placement(Enum):
    """The order of stages over ranks. Chunk c holds the stages from ``c * num_ranks`` on."""

    LOOP = "loop"
    """Every chunk goes from the first rank to the last: ``stage = chunk * num_ranks + rank``."""
    V = "v"
    """Every second chunk goes back from the last rank to the first."""


def stage_of(rank: int, chunk: int, num_ranks: int, placement: Placement = Placement.LOOP) -> int:
    """Return the global stage that is model chunk ``chunk`` of ``rank``."""
    goes_back = placement is Placement.V and chunk % 2 == 1
    return chunk * num_ranks + (num_ranks - 1 - rank if goes_back else rank)


def rank_of(stage: int, num_ranks: int, placement: Placement = Placement.LOOP) -> int:
    """Return the pipeline rank that holds a stage."""
    goes_back = placement is Placement.V and stage // num_ranks % 2 == 1
    return num_ranks - 1 - stage % num_ranks if goes_back else stage % num_ranks


def chunk_of(stage: int, num_ranks: int) -> int:
    """Return the index of a stage among its rank's model chunks, in either placement."""
    return stage // num_ranks

"""The placement of stages: the rank and the model chunk of each."""

from __future__ import annotations

from enum import Enum

__all__ = ["Placement", "chunk_of", "rank_of", "stage_of"]


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

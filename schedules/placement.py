"""Where a stage lives: on which rank, and as which of the rank's model chunks."""

from __future__ import annotations

from enum import Enum

__all__ = ["Placement", "chunk_of", "rank_of", "stage_of"]


class Placement(Enum):
    """The way of the stages over the ranks. Chunk c holds stages ``c * num_ranks`` onwards."""

    LOOP = "loop"
    """Every chunk goes from the first rank to the last: ``stage = chunk * num_ranks + rank``."""
    V = "v"
    """Every other chunk goes back from the last rank to the first."""


def stage_of(rank: int, chunk: int, num_ranks: int, placement: Placement = Placement.LOOP) -> int:
    """The global stage held by ``rank`` as its model chunk number ``chunk``."""
    goes_back = placement is Placement.V and chunk % 2 == 1
    return chunk * num_ranks + (num_ranks - 1 - rank if goes_back else rank)


def rank_of(stage: int, num_ranks: int, placement: Placement = Placement.LOOP) -> int:
    """The pipeline rank that holds ``stage``."""
    goes_back = placement is Placement.V and stage // num_ranks % 2 == 1
    return num_ranks - 1 - stage % num_ranks if goes_back else stage % num_ranks


def chunk_of(stage: int, num_ranks: int) -> int:
    """The index of ``stage`` among the model chunks of its rank, in either placement."""
    return stage // num_ranks

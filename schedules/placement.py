"""Where a stage lives: the loop placement, ``stage = chunk * num_ranks + rank``."""

from __future__ import annotations

__all__ = ["chunk_of", "rank_of", "stage_of"]


def stage_of(rank: int, chunk: int, num_ranks: int) -> int:
    """The global stage held by ``rank`` as its model chunk number ``chunk``."""
    return chunk * num_ranks + rank


def rank_of(stage: int, num_ranks: int) -> int:
    """The pipeline rank that holds ``stage``."""
    return stage % num_ranks


def chunk_of(stage: int, num_ranks: int) -> int:
    """The index of ``stage`` among the model chunks of its rank."""
    return stage // num_ranks

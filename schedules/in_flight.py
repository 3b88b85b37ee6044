"""The number of microbatches that a rank holds at once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InFlight"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """Largest numbers of microbatches in flight on one rank.

    Attributes:
        per_chunk: the peak of each chunk; chunks may peak at different times.
        together: the peak of the sum over chunks, at most the sum of ``per_chunk``.
    """

    per_chunk: tuple[int, ...]
    together: int

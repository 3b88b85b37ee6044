"""How much a rank holds at once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["InFlight"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """Largest numbers of microbatches in flight on one rank.

    Attributes:
        per_chunk: Per chunk, its own peak; the chunks need not peak together.
        together: Peak of all chunks counted together, at most the sum of ``per_chunk``.
    """

    per_chunk: tuple[int, ...]
    together: int

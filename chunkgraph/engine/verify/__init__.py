"""The verify modes: compare replays with eager passes, and fill dead memory with NaN."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from chunkgraph.engine.bits import same_bits
from chunkgraph.engine.chunk import Chunk
from chunkgraph.engine.options import VerifyMode
from chunkgraph.engine.tree import Call
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.eager_pass import Surroundings
from chunkgraph.engine.verify.poisoned import PoisonVerifier
from chunkgraph.engine.verify.shadow import ShadowVerifier

__all__ = ["Surroundings", "Verifier", "new_verifier", "same_bits"]


def new_verifier(
    mode: VerifyMode,
    chunks: Sequence[Chunk],
    samples: Mapping[Hashable, Sequence[Call]],
    surroundings: Surroundings,
) -> Verifier | None:
    """Return the verifier for the next capture; None for the mode ``none``."""
    if mode == "none":
        return None
    kind = PoisonVerifier if mode == "poison" else ShadowVerifier
    return kind(chunks, samples, surroundings)

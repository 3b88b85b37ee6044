"""The verify modes: compare replays with eager passes, and fill dead memory with NaN."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from chunkgraph.engine.bits import same_bits
from chunkgraph.engine.chunk import CaptureOptions, Chunk, Host
from chunkgraph.engine.tree import Call
from chunkgraph.engine.verify.base import Verifier
from chunkgraph.engine.verify.eager_pass import Surroundings
from chunkgraph.engine.verify.poisoned import PoisonVerifier
from chunkgraph.engine.verify.shadow import ShadowVerifier
from chunkgraph.graphs import GraphBackend

__all__ = ["Surroundings", "Verifier", "new_verifier", "same_bits"]


def new_verifier(
    options: CaptureOptions,
    chunks: Sequence[Chunk],
    samples: Mapping[Hashable, Sequence[Call]],
    backend: GraphBackend,
    host: Host,
) -> Verifier | None:
    """Return the verifier for the next capture; None for the mode ``none``."""
    if options.verify == "none":
        return None
    kind = PoisonVerifier if options.verify == "poison" else ShadowVerifier
    return kind(chunks, samples, Surroundings(backend, host), options)

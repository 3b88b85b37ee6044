"""The verify modes: compare replays with eager passes, and fill dead memory with NaN."""

from chunkgraph.engine.verify.poisoned import PoisonVerifier
from chunkgraph.engine.verify.shadow import ShadowVerifier

__all__ = ["VERIFIERS"]

VERIFIERS = {"poison": PoisonVerifier, "shadow": ShadowVerifier}

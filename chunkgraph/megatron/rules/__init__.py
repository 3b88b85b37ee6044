"""The rules of features that a configuration file, a program and a command line share.

They import no torch, so that a command checks a file before it starts a process.
"""

from __future__ import annotations

from chunkgraph.megatron.rules.experts import EXPERT_RULES
from chunkgraph.megatron.rules.features import (
    CONTEXT_RULES,
    FILE_ONLY_RULES,
    FP8_RULES,
    HYBRID_RULES,
    RECOMPUTE_RULES,
    SCHEDULE_RULES,
    SLOT_RULES,
    STASH_RULES,
)

__all__ = ["FILE_RULES"]

FILE_RULES = (
    *SCHEDULE_RULES,
    *SLOT_RULES,
    *FILE_ONLY_RULES,
    *FP8_RULES,
    *RECOMPUTE_RULES,
    *CONTEXT_RULES,
    *EXPERT_RULES,
    *HYBRID_RULES,
    *STASH_RULES,
)
"""Rules of features that a configuration file can turn on."""

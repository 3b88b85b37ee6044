"""The rules of features that a configuration file, a program and a command line share.

They import no torch, so that a command checks a file before it starts a process.
"""

from __future__ import annotations

from chunkgraph.megatron.rules.contexts import CONTEXT_FILE_RULES
from chunkgraph.megatron.rules.experts import EXPERT_RULES
from chunkgraph.megatron.rules.features import FP8_RULES, RECOMPUTE_RULES, STASH_RULES
from chunkgraph.megatron.rules.file_only import FILE_ONLY_RULES
from chunkgraph.megatron.rules.hybrid import HYBRID_RULES, check_hybrid
from chunkgraph.megatron.rules.schedules import SCHEDULE_RULES, SLOT_RULES
from chunkgraph.settings import Config
from chunkgraph.settings.rule import check
from chunkgraph.settings.words import facts_of

__all__ = ["FILE_RULES", "check_features"]

FILE_RULES = (
    *SCHEDULE_RULES,
    *SLOT_RULES,
    *FILE_ONLY_RULES,
    *FP8_RULES,
    *RECOMPUTE_RULES,
    *CONTEXT_FILE_RULES,
    *EXPERT_RULES,
    *HYBRID_RULES,
    *STASH_RULES,
)
"""Rules of features that a configuration file can turn on."""


def check_features(config: Config) -> None:
    """Check the settings of features against each other.

    Raises:
        ConfigError: Settings cannot go together (TopologyError if they cannot form a pipeline).
    """
    check(FILE_RULES, facts_of(config), "these settings cannot go together:")
    check_hybrid(config)

"""Context parallelism whose size changes from microbatch to microbatch: a bank for each size.

`chunkgraph.packing.schedule_contexts` says which ranks work on which documents; `ContextGroups` are
the process groups that they do it with; `ContextBanks` name the bank of every microbatch. With a
Megatron model, `follow_groups` tells its attention and ``attach(packing=banks)`` makes the
graphs; `ContextGraphs` are chunk graphs of any modules that hold all banks.
"""

from chunkgraph.megatron.features.contexts.attention import follow_groups
from chunkgraph.megatron.features.contexts.banks import ContextBanks
from chunkgraph.megatron.features.contexts.graphs import ContextGraphs
from chunkgraph.megatron.features.contexts.groups import ContextGroups, HeldGroups, groups_put_back
from chunkgraph.megatron.features.contexts.key import ContextBank, ScheduledBanks, digest_of_plan
from chunkgraph.megatron.features.contexts.steps import StepContexts

__all__ = [
    "ContextBank",
    "ContextBanks",
    "ContextGraphs",
    "ContextGroups",
    "HeldGroups",
    "ScheduledBanks",
    "StepContexts",
    "digest_of_plan",
    "follow_groups",
    "groups_put_back",
]

"""Context parallelism whose size changes from microbatch to microbatch: a bank for each size.

`chunkgraph.packing.schedule_contexts` says which ranks work on which documents; `ContextGroups` are
the process groups that they do it with; `ContextBanks` name the bank of every microbatch; and
`ContextGraphs` are chunk graphs that hold all of them.
"""

from chunkgraph.megatron.contexts.banks import ContextBanks
from chunkgraph.megatron.contexts.graphs import ContextGraphs
from chunkgraph.megatron.contexts.groups import ContextGroups, groups_put_back
from chunkgraph.megatron.contexts.key import ContextBank

__all__ = ["ContextBank", "ContextBanks", "ContextGraphs", "ContextGroups", "groups_put_back"]

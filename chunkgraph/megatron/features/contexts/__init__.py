"""Context parallelism whose size changes from microbatch to microbatch.

`chunkgraph.packing.schedule_contexts` decides which ranks work on which documents, `ContextGroups`
holds their process groups, and `PackedBanks.of_limits` makes the banks of all sizes.
`follow_groups` makes a Megatron model's attention use each microbatch's group, and
``attach(packing=banks)`` captures the graphs.
"""

from chunkgraph.megatron.features.contexts.feature import follow_groups
from chunkgraph.megatron.features.contexts.groups import ContextGroups

__all__ = ["ContextGroups", "follow_groups"]

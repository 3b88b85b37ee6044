"""Context parallelism whose size changes from microbatch to microbatch.

`chunkgraph.packing.schedule_contexts` says which ranks work on which documents; `ContextGroups` are
the process groups that they do it with, and `PackedBanks.of_limits` the banks of all sizes.
`follow_groups` tells a Megatron model's attention of each microbatch's group, and
``attach(packing=banks)`` makes the graphs.
"""

from chunkgraph.megatron.features.contexts.attention import follow_groups
from chunkgraph.megatron.features.contexts.groups import ContextGroups, HeldGroups, groups_put_back

__all__ = ["ContextGroups", "HeldGroups", "follow_groups", "groups_put_back"]

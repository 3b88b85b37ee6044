"""Pools of graphs, and the proof that slots do not overwrite each other."""

from chunkgraph.memory.pools import PoolPlan
from chunkgraph.memory.proof import SlotFootprint, find_conflicts, prove_disjoint

__all__ = [
    "PoolPlan",
    "SlotFootprint",
    "find_conflicts",
    "prove_disjoint",
]

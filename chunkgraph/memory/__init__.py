"""Memory plans, and the proof that slots do not overwrite each other."""

from chunkgraph.memory.pools import MemoryPlan, PoolPlan, plan_for_slots
from chunkgraph.memory.proof import SlotFootprint, find_conflicts, prove_disjoint

__all__ = [
    "MemoryPlan",
    "PoolPlan",
    "SlotFootprint",
    "find_conflicts",
    "plan_for_slots",
    "prove_disjoint",
]

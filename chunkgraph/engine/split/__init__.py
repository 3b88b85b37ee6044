"""Split backwards: the input gradients first, the weight gradients when the schedule has time."""

from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.engine.split.program import SPLIT
from chunkgraph.engine.split.weights import WeightBackwards

__all__ = ["SPLIT", "DelayedModules", "WeightBackwards"]

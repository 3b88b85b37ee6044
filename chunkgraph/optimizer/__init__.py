"""The step of an optimizer as one graph, with the norm and the clipping of gradients before it."""

from chunkgraph.optimizer.captured import CapturedOptimizer
from chunkgraph.optimizer.state import OptimizerState, SettledGradients
from chunkgraph.optimizer.step_graph import StepGraph

__all__ = ["CapturedOptimizer", "OptimizerState", "SettledGradients", "StepGraph"]

"""Captured stages for all schedules of torch.distributed.pipelining."""

from chunkgraph.pipelining.schedule import GraphedSchedule
from chunkgraph.pipelining.stage import GraphedStage, graphed

__all__ = ["GraphedSchedule", "GraphedStage", "graphed"]

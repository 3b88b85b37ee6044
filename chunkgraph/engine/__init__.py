"""A chunk's slots, the capture session, replay and the decision of every step."""

from chunkgraph.engine.agreement import Agree
from chunkgraph.engine.banks import Banks
from chunkgraph.engine.capture.graph_set import CaptureReport
from chunkgraph.engine.capture.static_inputs import mark_constant
from chunkgraph.engine.chunk import CaptureOptions, Chunk, GradientMarker, Host
from chunkgraph.engine.engine import ChunkGraphs
from chunkgraph.engine.observer import Counters, Observer, ReplayRanges
from chunkgraph.engine.program import FORWARD_ONLY
from chunkgraph.engine.step import EagerReason, StepMode, StepPlan
from chunkgraph.slots import RankSchedule

__all__ = [
    "FORWARD_ONLY",
    "Agree",
    "Banks",
    "CaptureOptions",
    "CaptureReport",
    "Chunk",
    "ChunkGraphs",
    "Counters",
    "EagerReason",
    "GradientMarker",
    "Host",
    "Observer",
    "RankSchedule",
    "ReplayRanges",
    "StepMode",
    "StepPlan",
    "mark_constant",
]

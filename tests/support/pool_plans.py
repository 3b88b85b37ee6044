"""Capture with a memory plan that the number of slots would not choose."""

from __future__ import annotations

import dataclasses

from chunkgraph.engine import ChunkGraphs
from chunkgraph.memory import MemoryPlan


def use_plan(graphs: ChunkGraphs, plan: MemoryPlan, *, prove: bool = True) -> None:
    """Capture under ``plan``; without the proof, if tests need what it would refuse."""
    settings = dataclasses.replace(graphs._capturer.settings, memory_plan=plan, prove=prove)
    graphs._capturer = dataclasses.replace(graphs._capturer, settings=settings)

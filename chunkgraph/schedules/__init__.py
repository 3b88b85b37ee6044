"""Pipeline schedules as plain values: build, validate, simulate, draw, read and write.

Needs no torch. To add a schedule, write a function that returns a rank's actions, and the closed
forms of what a rank holds and idles (see ``one_chunk.py``). List them in ``registry.py``; tests
then compare the closed forms with the actions.
"""

from __future__ import annotations

from chunkgraph.schedules.action import Action, Op
from chunkgraph.schedules.build import (
    LegalCounts,
    build_schedule,
    check_sizes,
    check_step,
    legal_counts,
    megatron_schedule,
)
from chunkgraph.schedules.draw_svg import draw_svg
from chunkgraph.schedules.files import (
    FILE_SUFFIX,
    check_counts,
    read_matching_schedule,
    read_schedule,
    splits_backward,
)
from chunkgraph.schedules.registry import (
    ScheduleFamily,
    get_family,
    list_schedules,
    megatron_schedule_name,
)
from chunkgraph.schedules.schedule import Schedule
from chunkgraph.schedules.shape import (
    InFlight,
    PipelineShape,
    Placement,
    chunk_of,
    rank_of,
    stage_of,
)
from chunkgraph.schedules.simulate import CostModel, Simulation, Span, simulate
from chunkgraph.schedules.transfers import num_ended_sends, with_transfers
from chunkgraph.schedules.validate import validate

__all__ = [
    "FILE_SUFFIX",
    "Action",
    "CostModel",
    "InFlight",
    "LegalCounts",
    "Op",
    "PipelineShape",
    "Placement",
    "Schedule",
    "ScheduleFamily",
    "Simulation",
    "Span",
    "build_schedule",
    "check_counts",
    "check_sizes",
    "check_step",
    "chunk_of",
    "draw_svg",
    "get_family",
    "legal_counts",
    "list_schedules",
    "megatron_schedule",
    "megatron_schedule_name",
    "num_ended_sends",
    "rank_of",
    "read_matching_schedule",
    "read_schedule",
    "simulate",
    "splits_backward",
    "stage_of",
    "validate",
    "with_transfers",
]

"""Pipeline schedules as plain values: build, validate, simulate, draw, read and write.

Needs no torch. To add a schedule, write one file with ``rank_actions(shape, rank)`` and the closed
forms ``in_flight`` and ``idle_forwards`` (see ``one_f_one_b.py``). List it in ``registry.py``;
tests then compare the closed forms with the actions.
"""

from __future__ import annotations

from .action import Action, Op
from .build import build_schedule, megatron_schedule
from .draw_svg import draw_svg
from .draw_text import draw_text, text_panels
from .files import (
    FILE_SUFFIX,
    check_counts,
    read_matching_schedule,
    read_schedule,
    splits_backward,
)
from .in_flight import InFlight
from .legality import check_sizes, check_step, is_legal_count, legal_counts, nearest_legal_counts
from .placement import Placement, chunk_of, rank_of, stage_of
from .registry import ScheduleFamily, get_family, list_schedules, megatron_schedule_name
from .schedule import Schedule
from .shape import PipelineShape
from .simulate import CostModel, Simulation, Span, simulate
from .transfers import num_ended_sends, with_transfers
from .validate import validate

__all__ = [
    "FILE_SUFFIX",
    "Action",
    "CostModel",
    "InFlight",
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
    "draw_text",
    "get_family",
    "is_legal_count",
    "legal_counts",
    "list_schedules",
    "megatron_schedule",
    "megatron_schedule_name",
    "nearest_legal_counts",
    "num_ended_sends",
    "rank_of",
    "read_matching_schedule",
    "read_schedule",
    "simulate",
    "splits_backward",
    "stage_of",
    "text_panels",
    "validate",
    "with_transfers",
]

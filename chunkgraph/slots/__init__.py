"""Slots: plan their number (pure), estimate their memory, and track them at run time.

Needs no torch.
"""

from __future__ import annotations

from .estimate import ExpertSizes, LatentSizes, MemoryEstimate, ModelSizes, estimate_memory
from .machine import SlotMachine
from .pages import Page, PageClock, PagePlan, RankSchedule, least_slots, plan_pages, split_actions
from .plan import SlotPlan, assign_slots, in_flight, plan_schedule, plan_slots

__all__ = [
    "ExpertSizes",
    "LatentSizes",
    "MemoryEstimate",
    "ModelSizes",
    "Page",
    "PageClock",
    "PagePlan",
    "RankSchedule",
    "SlotMachine",
    "SlotPlan",
    "assign_slots",
    "estimate_memory",
    "in_flight",
    "least_slots",
    "plan_pages",
    "plan_schedule",
    "plan_slots",
    "split_actions",
]

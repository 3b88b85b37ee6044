"""Slots: plan their number (pure), estimate their memory, and track them at run time.

Needs no torch.
"""

from __future__ import annotations

from .estimate import ExpertSizes, LatentSizes, MemoryEstimate, ModelSizes, estimate_memory
from .machine import SlotMachine
from .plan import SlotPlan, assign_slots, in_flight, plan_schedule, plan_slots

__all__ = [
    "ExpertSizes",
    "LatentSizes",
    "MemoryEstimate",
    "ModelSizes",
    "SlotMachine",
    "SlotPlan",
    "assign_slots",
    "estimate_memory",
    "in_flight",
    "plan_schedule",
    "plan_slots",
]

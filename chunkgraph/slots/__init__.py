"""Slots: plan their number (pure), estimate their memory, and track them at run time.

Needs no torch.
"""

from __future__ import annotations

from .estimate import MemoryEstimate, estimate_memory
from .lifetime import InFlight, assign_slots, in_flight
from .machine import SlotMachine
from .model_sizes import ExpertSizes, LatentSizes, ModelSizes
from .plan import SlotPlan, plan_all_ranks, plan_schedule, plan_slots

__all__ = [
    "ExpertSizes",
    "InFlight",
    "LatentSizes",
    "MemoryEstimate",
    "ModelSizes",
    "SlotMachine",
    "SlotPlan",
    "assign_slots",
    "estimate_memory",
    "in_flight",
    "plan_all_ranks",
    "plan_schedule",
    "plan_slots",
]

"""How and when to capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chunkgraph.memory import MemoryPlan

__all__ = ["CaptureOptions"]


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How and when to capture.

    Attributes:
        num_warmup_steps: eager training steps before the capture session.
        num_warmup_passes: eager passes over each chunk on the capture stream, in the session.
            None: 1 on a GPU, 0 on the CPU recorder.
        memory_plan: which pools the graphs use; see `chunkgraph.memory.plan`.
        poison: fill scratch and freed slots with NaN around every replay (debugging; slow).
        on_failure: what follows a failed capture once the model is back in order: ``raise`` the
            error, or train on eagerly (``eager``) after one warning.
    """

    num_warmup_steps: int = 1
    num_warmup_passes: int | None = None
    memory_plan: MemoryPlan = "shared_backward"
    poison: bool = False
    on_failure: Literal["raise", "eager"] = "raise"

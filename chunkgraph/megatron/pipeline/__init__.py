"""Pipeline schedules, as values, that drive an unmodified Megatron-core model."""

from __future__ import annotations

from chunkgraph.megatron.pipeline.driver import ScheduleDriver

__all__ = ["ScheduleDriver"]

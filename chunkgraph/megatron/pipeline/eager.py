"""A schedule that drives a model without chunk graphs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from chunkgraph.engine.split.delayed import DelayedModules
from chunkgraph.megatron.core.delayed_weights import facts_of_delays
from chunkgraph.megatron.pipeline.choice import PipelineSchedule, refuse_other_schedules
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.megatron.refusals import DELAY_RULES, DRIVER_RULES, facts_of_model
from chunkgraph.megatron.site import config_of, new_agreement
from chunkgraph.megatron.topology import PipelinePlace
from chunkgraph.settings.rule import check

__all__ = ["eager_driver"]


def eager_driver(chunks: Sequence[nn.Module], name: str) -> ScheduleDriver:
    """Return a forward-backward function that runs a schedule without graphs.

    All ranks call it together.

    Args:
        chunks: Model chunks of this rank, wrapped as for training.
        name: As `attach` takes ``schedule``.

    Raises:
        ConfigError: The schedule does not match the model, or another rank has another one.
        ScheduleError: The file holds no valid schedule.
    """
    config = config_of(chunks[0])
    place = PipelinePlace.current(len(chunks), config)
    schedule = PipelineSchedule.of(name, place)
    facts = {"schedule": name, "splits_backward": schedule.splits_backward}
    check(
        (*DRIVER_RULES, *DELAY_RULES),
        facts_of_model(config, {**facts, **facts_of_delays(chunks)}),
        "This schedule cannot drive the model:",
    )
    with ExitStack() as undo:
        refuse_other_schedules(schedule, place.rank, new_agreement(undo))
    delayed = [DelayedModules(c, place.label(i)) for i, c in enumerate(chunks)]
    return ScheduleDriver(schedule.build, place.pipeline_rank, lambda c: delayed[c].run(()))

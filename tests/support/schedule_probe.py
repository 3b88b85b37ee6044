"""A case of `run_cases`: training by a schedule of chunkgraph against Megatron's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from chunkgraph.megatron.pipeline.choice import PipelinePlace
from chunkgraph.megatron.pipeline.driver import ScheduleDriver
from chunkgraph.schedules import build_schedule
from chunkgraph.settings import Config
from chunkgraph.trainer.compare import TrainingRun, run_eager
from chunkgraph.trainer.trained_model import TrainedModel


def run(
    config: Config,
    device: torch.device,
    case: dict[str, Any],
    eager_of: Callable[..., TrainingRun],
) -> dict[str, Any]:
    """Train eagerly by Megatron's function and by the schedule; compare bits."""
    options = {"ddp_options": case.get("ddp_options")}
    expected = eager_of(case, lambda: run_eager(config, device, **options))
    model = TrainedModel(config, device, **options)
    place = PipelinePlace.current(len(model.chunks), model.chunks[0].config)
    model.schedule = ScheduleDriver(
        lambda count: build_schedule(
            case["schedule"],
            num_ranks=place.pipeline_size,
            num_chunks=place.num_chunks,
            num_microbatches=count,
        ),
        place.pipeline_rank,
    )
    model.train_eagerly()
    steps = [
        model.run_step(step, model.draw(step), announces_next=False)
        for step in range(len(config.train.num_microbatches))
    ]
    model.finish_parameter_gather()
    actual = {
        f"{index}.{name}": value.detach().cpu()
        for index, chunk in enumerate(model.chunks)
        for name, value in (*chunk.named_parameters(), *chunk.named_buffers())
    }
    model.close()
    return {
        "losses": [(a.loss, b.loss) for a, b in zip(steps, expected.steps, strict=True)],
        "grad_norms": [
            (a.grad_norm, b.grad_norm) for a, b in zip(steps, expected.steps, strict=True)
        ],
        "different": [
            name
            for name, value in expected.parameters.items()
            if not torch.equal(value, actual[name])
        ],
    }

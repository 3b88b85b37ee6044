"""A case of `run_cases`: Megatron's overlap of the transfers of experts, on and off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from gathering import of_ranks
from in_process import Trained

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron.features.experts.overlap import turn_off_overlap
from chunkgraph.trainer import trained_model as plain

_OVERLAP = "overlap_moe_expert_parallel_comm"


def run(config: Any, device: torch.device, case: dict[str, Any]) -> list[list[str]]:
    """Run steps of three equal models: with the overlap, without it, and with graphs.

    Args:
        config: Configuration of the run.
        device: Device of the models.
        case: ``transformer_options``.

    Returns:
        By rank, the names of losses, gradients and metrics unlike those of the first model.
    """
    options = {**(case.get("transformer_options") or {}), _OVERLAP: True}
    results: list[list[dict[str, torch.Tensor]]] = []
    for kind in ("overlap", "eager", "graphs"):
        model = Trained(device, config, None, seed=config.train.seed, transformer_options=options)
        # Each step overlaps passes; in a pipeline the first four of these are none of them.
        count = 4 if len(model.chunks) > 1 else 2
        with contextlib.ExitStack() as undo:
            if kind != "overlap":
                turn_off_overlap([m for chunk in model.chunks for m in chunk.modules()], undo)
            if kind == "graphs":
                model.attach(options=CaptureOptions(num_warmup_steps=1))
                undo.callback(model.graphs.detach)
            results.append([model.results(s, count, forward=_forward_step) for s in range(2)])
            assert model.graphs is None or model.graphs.counters.replays > 0
    mine = [
        f"{kind}, step {step}: {name}"
        for kind, steps in zip(("eager", "graphs"), results[1:], strict=True)
        for step, (expected, values) in enumerate(zip(results[0], steps, strict=True))
        for name, value in expected.items()
        if not torch.equal(value, values[name])
    ]
    return of_ranks(mine)


def _forward_step(
    data: Iterator[dict[str, Any]], chunk: Any, return_schedule_plan: bool = False
) -> Any:
    if not return_schedule_plan:
        return plain.forward_step(data, chunk)
    return plain.forward_step(data, chunk.build_schedule_plan)

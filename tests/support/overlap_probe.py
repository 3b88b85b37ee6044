"""A case of `run_cases`: Megatron's overlap of the transfers of experts, on and off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from chunkgraph.data import PackedText
from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron import attach
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.megatron.features.experts.overlap import turn_off_overlap
from chunkgraph.megatron.features.experts.state import forget_expert_metrics, take_expert_metrics
from chunkgraph.trainer import forward_step as plain
from chunkgraph.trainer.batches import sequence_batches
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything

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
        forget_expert_metrics()
        seed_everything(config.train.seed, device)
        chunks: Any = build_model(config, device, transformer_options=options)
        schedule = import_megatron("megatron.core.pipeline_parallel").get_forward_backward_func()
        with contextlib.ExitStack() as undo:
            if kind != "overlap":
                turn_off_overlap([m for chunk in chunks for m in chunk.modules()], undo)
            graphs = None
            if kind == "graphs":
                graphs = attach(chunks, options=CaptureOptions(num_warmup_steps=1))
                undo.callback(graphs.detach)
                schedule = graphs.wrap_forward_backward(schedule)
            results.append([_step(config, device, chunks, step, schedule) for step in range(2)])
            assert graphs is None or graphs.counters.replays > 0
    mine = [
        f"{kind}, step {step}: {name}"
        for kind, steps in zip(("eager", "graphs"), results[1:], strict=True)
        for step, (expected, values) in enumerate(zip(results[0], steps, strict=True))
        for name, value in expected.items()
        if not torch.equal(value, values[name])
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _step(
    config: Any, device: torch.device, chunks: Any, step: int, schedule: Any
) -> dict[str, torch.Tensor]:
    text = PackedText.from_file(None, seq_length=config.model.seq_length, seed=1)
    for chunk in chunks:
        chunk.zero_grad_buffer()
    # Each step overlaps passes; in a pipeline the first four of these are none of them.
    count = 4 if len(chunks) > 1 else 2
    data = [sequence_batches(config, text, step, count, device) for _ in chunks]
    losses = schedule(
        forward_step_func=_forward_step,
        data_iterator=data if len(chunks) > 1 else data[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=config.model.seq_length,
        micro_batch_size=config.train.micro_batch_size,
        forward_only=False,
    )
    results = {
        f"chunk {index}: {name}": parameter.main_grad.clone()
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    results["losses"] = torch.tensor([float(loss["lm loss"]) for loss in losses])
    results.update({n: torch.tensor(v) for n, v in take_expert_metrics().items()})
    return results


def _forward_step(
    data: Iterator[dict[str, Any]], chunk: Any, return_schedule_plan: bool = False
) -> Any:
    if not return_schedule_plan:
        return plain.forward_step(data, chunk)
    return plain.forward_step(data, chunk.build_schedule_plan)

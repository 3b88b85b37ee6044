"""A case of `run_cases`: replayed steps on packed documents in which any host read is an error."""

from __future__ import annotations

from typing import Any

import torch

from chunkgraph.megatron.attachment import attach, config_of
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.trainer.batches import PackedBatches, packed_shape
from chunkgraph.trainer.forward_step import forward_step
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything
from chunkgraph.trainer.trained_model import capture_options


def run(config: Any, device: torch.device, case: dict[str, Any]) -> dict[str, Any]:
    """Run the case; return the number of replays and the losses."""
    seed_everything(config.train.seed, device)
    chunks = build_model(config, device, transformer_options=case.get("transformer_options"))
    model_config = config_of(chunks[0])
    shape = packed_shape(config, model_config)
    assert shape is not None
    batches = PackedBatches(config, device, model_config)
    graphs = attach(
        chunks, scope=config.capture.scope, options=capture_options(config), packing=shape
    )
    schedules = import_megatron("megatron.core.pipeline_parallel")
    run_step = graphs.wrap_forward_backward(schedules.get_forward_backward_func())
    counts = config.train.num_microbatches
    losses = []
    try:
        for step, count in enumerate(counts):
            if device.type == "cuda" and graphs.engine.report is not None:
                torch.cuda.set_sync_debug_mode("error")
            try:
                entries = run_step(
                    forward_step_func=forward_step,
                    data_iterator=[batches.step(step, count) for _ in chunks],
                    model=chunks,
                    num_microbatches=count,
                    seq_length=config.tokens_per_sequence,
                    micro_batch_size=1,
                    forward_only=False,
                    packings=batches.schedule_options(step, count)["packings"],
                )
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            losses += [float(entry["lm loss"]) for entry in entries]
        return {"replays": graphs.counters.replays, "losses": losses}
    finally:
        graphs.detach()

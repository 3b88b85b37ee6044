"""A case of `run_cases`: a script that ends its process groups while graphs are attached."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from chunkgraph.data import PackedText
from chunkgraph.megatron.attachment import attach
from chunkgraph.megatron.core.access import import_megatron
from chunkgraph.trainer.batches import sequence_batches as microbatches
from chunkgraph.trainer.forward_step import forward_step
from chunkgraph.trainer.model import build_model
from chunkgraph.trainer.setup import seed_everything
from chunkgraph.trainer.trained_model import capture_options


def run(config: Any, device: torch.device, case: dict[str, Any]) -> NoReturn:
    """Write the state before and after the groups end, and end the process."""
    seed_everything(config.train.seed, device)
    chunks = build_model(config, device)
    graphs = attach(chunks, scope=config.capture.scope, options=capture_options(config))
    schedules = import_megatron("megatron.core.pipeline_parallel")
    run_step = graphs.wrap_forward_backward(schedules.get_forward_backward_func())
    text = PackedText.from_file(None, seq_length=config.model.seq_length, seed=1)
    for step, count in enumerate(config.train.num_microbatches):
        run_step(
            forward_step_func=forward_step,
            data_iterator=[microbatches(config, text, step, count, device) for _ in chunks],
            model=chunks,
            num_microbatches=count,
            seq_length=config.model.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            forward_only=False,
        )
    engine = graphs.engine
    report = {"replays": engine.counters.replays, "was_captured": engine.report is not None}
    del graphs, run_step  # as the end of a function does
    gc.collect()
    import_megatron("megatron.core.parallel_state").destroy_model_parallel()
    dist.destroy_process_group()
    report["is_captured"] = engine.report is not None
    report["has_groups"] = dist.is_initialized()
    Path(f"{case['out']}{os.environ['RANK']}.json").write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)  # the caller would end the groups once more

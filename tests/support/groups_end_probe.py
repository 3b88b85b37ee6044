"""A case of `run_cases`: a script that ends its process groups while graphs are attached."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import in_process
import torch
import torch.distributed as dist

from chunkgraph.engine import CaptureOptions
from chunkgraph.megatron.core.access import import_megatron


def run(config: Any, device: torch.device, case: dict[str, Any]) -> NoReturn:
    """Write the state before and after the groups end, and end the process."""
    graphs = {"scope": config.capture.scope, "options": CaptureOptions(**config.capture.options)}
    model = in_process.Trained(device, config, graphs, seed=config.train.seed)
    for step, count in enumerate(config.train.num_microbatches):
        model.step(step, count)
    engine = model.graphs.engine
    report = {"replays": engine.counters.replays, "was_captured": engine.report is not None}
    in_process._attached.clear()
    del model  # as the end of a function does
    gc.collect()
    import_megatron("megatron.core.parallel_state").destroy_model_parallel()
    dist.destroy_process_group()
    report["is_captured"] = engine.report is not None
    report["has_groups"] = dist.is_initialized()
    Path(f"{case['out']}{os.environ['RANK']}.json").write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)  # the caller would end the groups once more

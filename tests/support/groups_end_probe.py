"""Process groups that end while graphs are attached, at the end of a script or between steps."""

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


def make_anew(config: Any, store: Path) -> None:
    """Destroy all process groups and make new ones, as slime does around a rollout.

    Args:
        config: the run.
        store: a file that no other groups met at.
    """
    state = import_megatron("megatron.core.parallel_state")
    rank, size, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    names = {g: name for name, g in vars(state).items() if isinstance(g, dist.ProcessGroup)}
    holders = {group: gc.get_referrers(group) for group in names}
    state.destroy_model_parallel()
    dist.destroy_process_group()
    meeting = dist.FileStore(str(store), size)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=size)
    state.initialize_model_parallel(
        tensor_model_parallel_size=config.pipeline.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline.pipeline_model_parallel_size,
    )
    for group, name in names.items():  # what holds a group goes on with the new one
        for holder in holders[group]:
            values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
            for key in [key for key, value in values.items() if value is group]:
                values[key] = getattr(state, name)


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

"""One process of one variant: reads ``bench.json`` in the run folder, leaves ``result.json``.

``result.json`` is written by rank 0 after the measured steps, and again after each further phase,
so that what a crash leaves is the truth up to there; ``phase`` is the last phase that ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from chunkgraph.settings import Config, load_config

__all__ = ["REQUEST_FILE", "RESULT_FILE", "Request", "main"]

REQUEST_FILE = "bench.json"
RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The command's request to the workers.

    Attributes:
        variant: its name.
        label: its name in progress lines; None for ``variant``.
        num_host_steps: further steps in which host times are taken.
        num_profiled_steps: further steps under the profiler; 0 for none.
    """

    variant: str
    label: str | None = None
    num_host_steps: int = 3
    num_profiled_steps: int = 0


def main(config_path: str, run_dir: str) -> int:
    """Measure one variant; returns 0, or raises."""
    folder = Path(run_dir)
    request = Request(**json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8")))
    config = load_config(config_path)
    # Imported here: progress is reported before torch is loaded.
    import torch.distributed as dist

    from chunkgraph.bench.variants import make_variant
    from chunkgraph.jobs.processes import keep_quiet
    from chunkgraph.jobs.reports import write_error
    from chunkgraph.trainer.setup import training_process

    if not config.run.debug:
        keep_quiet()
    with training_process(config) as device:
        variant = make_variant(request.variant, config)
        try:
            _measure(config, request, device, variant, folder)
        except Exception as error:  # noqa: BLE001 - everything is reported
            # The end of process groups may wait for a rank that is stuck: say why before.
            _leave_process(write_error(folder, _rank(), error))
        if variant.has_fragile_end:
            dist.barrier()
            _leave_process(0)
    return 0


def _measure(config: Config, request: Request, device: Any, variant: Any, folder: Path) -> None:
    from chunkgraph.bench.measure import Step, VariantRun
    from chunkgraph.bench.summary import gathered_summary
    from chunkgraph.jobs.reports import write_whole

    is_first = _rank() == 0
    num_steps = config.bench.num_warmup_steps + config.bench.num_steps

    def on_step(kind: str, step: Step) -> None:
        if not is_first:
            return
        line = {
            "event": "step",
            "phase": request.label or request.variant,
            "kind": kind,
            "step": step.step,
            "num_steps": num_steps,
            "num_microbatches": step.num_microbatches,
            "step_ms": step.step_ms,
            "loss": step.loss,
        }
        with (folder / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write(phase: str) -> None:
        summary = gathered_summary(config, device, run.measurement)
        if is_first:
            write_whole(folder / RESULT_FILE, json.dumps({"phase": phase, **summary}))

    run = VariantRun(config, device, variant, on_step)
    run.measure_steps()
    write("steps")
    if request.num_host_steps:
        run.measure_host(request.num_host_steps)
        write("host")
    if request.num_profiled_steps and device.type == "cuda":
        run.measure_kernels(request.num_profiled_steps, folder / f"trace_rank{_rank()}.json")
    write("done")
    if not variant.has_fragile_end:
        run.close()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave_process(code: int) -> NoReturn:
    """End without taking down graphs and process groups, which may hang; all is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

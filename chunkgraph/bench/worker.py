"""Run one process of one variant: read ``bench.json`` in the run folder, write ``result.json``.

Rank 0 writes ``result.json`` after the measured steps, and again after each later phase, so that a
crash keeps the results up to then; ``phase`` is the last finished phase.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
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
        variant: Name of the variant.
        label: Name in progress lines; None for ``variant``.
        num_host_steps: Number of additional steps that measure host times.
        num_profiled_steps: Number of additional steps under the profiler.
    """

    variant: str
    label: str | None = None
    num_host_steps: int = 3
    num_profiled_steps: int = 0


def main(config_path: str, run_dir: str) -> int:
    """Measure one variant; return 0."""
    folder = Path(run_dir)
    request = Request(**json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8")))
    config = load_config(config_path)
    # Imported here: progress is reported before torch is loaded.
    import torch.distributed as dist

    from chunkgraph.jobs.processes import keep_quiet
    from chunkgraph.jobs.reports import write_error

    if not config.run.debug:
        keep_quiet()
    process, make_run = _runtime(config, request)
    with process as device:
        try:
            run = make_run(device, on_step=_reporter(config, request, folder))
            _measure(config, request, run, folder)
        except Exception as error:  # noqa: BLE001 - everything is reported
            # Destroying process groups may wait for a stuck rank, so report the error first.
            _leave_process(write_error(folder, _rank(), error))
        if run.has_fragile_end:
            dist.barrier()
            _leave_process(0)
    return 0


def _runtime(
    config: Config, request: Request
) -> tuple[AbstractContextManager[Any], Callable[..., Any]]:
    """Return the context of the process, and a function that makes the run on its device."""
    from chunkgraph.trainer.setup import rank_process, training_process

    if config.bench.runtime == "torch":
        from chunkgraph.bench.torch_run import TorchRun

        name = request.label or request.variant
        return rank_process(config), partial(TorchRun, config, name=name)
    from chunkgraph.bench.measure import VariantRun
    from chunkgraph.bench.variants import make_variant

    variant = make_variant(request.variant, config)  # refuses before it imports Megatron
    return training_process(config), partial(VariantRun, config, variant=variant)


def _reporter(config: Config, request: Request, folder: Path) -> Callable[[str, Any], None]:
    """Return a function that reports the steps of rank 0."""
    num_steps = config.bench.num_warmup_steps + config.bench.num_steps

    def on_step(kind: str, step: Any) -> None:
        if _rank() != 0:
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

    return on_step


def _measure(config: Config, request: Request, run: Any, folder: Path) -> None:
    from chunkgraph.bench.summary import gathered_summary
    from chunkgraph.jobs.reports import write_whole

    def write(phase: str) -> None:
        summary = gathered_summary(config, run.device, run.measurement)
        if _rank() == 0:
            write_whole(folder / RESULT_FILE, json.dumps({"phase": phase, **summary}))

    run.measure_steps()
    write("steps")
    if request.num_host_steps:
        run.measure_host(request.num_host_steps)
        write("host")
    if request.num_profiled_steps and run.device.type == "cuda":
        run.measure_kernels(request.num_profiled_steps, folder / f"trace_rank{_rank()}.json")
    run.measure_costs()
    write("done")
    if not run.has_fragile_end:
        run.close()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _leave_process(code: int) -> NoReturn:
    """End the process without freeing graphs and process groups, which may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

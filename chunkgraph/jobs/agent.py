"""Between the command and its workers: ``python -m ... RUN_DIR CONFIG NUM TARGET LOGS``.

It runs torchrun's elastic agent, so that the command itself stays free of torch and responsive,
and writes down which worker failed first.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import uuid
from pathlib import Path

from chunkgraph._collector import collector_paused
from chunkgraph.jobs.processes import PARENT_PID_VARIABLE, die_with_parent

with collector_paused():  # these imports are most of what an agent does
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["FAILURES_FILE", "main", "run_elastic"]

FAILURES_FILE = "failures.json"
"""In the run folder: a list of ``{"rank": int, "exit_code": int}``, signals negative."""


def main(run_dir: str, config_path: str, num_workers: str, target: str, logs: str) -> int:
    """Start the workers and wait for them; 0 when all of them succeeded.

    ``logs`` is ``on`` to let the elastic agent log; otherwise the launcher alone explains failures.
    """
    die_with_parent()
    if logs != "on":
        logging.disable(logging.CRITICAL)
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())
    command = ("-m", "chunkgraph.jobs.worker_main", target, config_path, run_dir)
    return run_elastic(Path(run_dir), int(num_workers), *command)


def run_elastic(folder: Path, num_workers: int, *command: str) -> int:
    """Run ``python -u *command`` once for each rank; failures are written down in ``folder``.

    Returns:
        0 when all ranks succeeded, 1 when one failed, 128 and the signal's number after a signal.
    """
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # port 0: the system picks a free one
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        ),
        sys.executable,
    )
    try:
        launch("-u", *command)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exit_code": failure.exitcode}
            for rank, failure in error.failures.items()
        ]
        path = folder / FAILURES_FILE
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(failures))
        temporary.replace(path)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

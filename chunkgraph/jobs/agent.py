"""Run the ranks of a job for a launcher: ``python -m ... FOLDER NUM_RANKS LOGS COMMAND...``.

This process runs torchrun's elastic agent, so that the launcher needs no torch and stays
responsive. It writes the exit codes of the failed ranks.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path

from chunkgraph._collector import collector_paused
from chunkgraph.jobs.exit_codes import EXIT_FAILED
from chunkgraph.jobs.failures import write_exit_codes
from chunkgraph.jobs.processes import PARENT_PID_VARIABLE, die_with_parent

with collector_paused():  # an agent spends most of its time in these imports
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

__all__ = ["main", "prepare_agent", "run_elastic"]


def main(folder: str, num_ranks: str, logs: str, *command: str) -> int:
    """Start the ranks and wait for them; return 0 if all of them succeeded."""
    prepare_agent(logs)
    return run_elastic(Path(folder), int(num_ranks), *command)


def prepare_agent(logs: str) -> None:
    """Tie this process to the launcher, and the ranks to this process.

    Args:
        logs: ``on`` makes the elastic agent log; otherwise only the launcher explains failures.
    """
    die_with_parent()
    if logs != "on":
        logging.disable(logging.CRITICAL)
    os.environ[PARENT_PID_VARIABLE] = str(os.getpid())


def run_elastic(folder: Path, num_ranks: int, *command: str) -> int:
    """Run ``python -u *command`` once for each rank, and write failures to ``folder``.

    Returns:
        0 if all ranks succeeded, 1 if one failed, 128 plus the signal's number after a signal.
    """
    launch = elastic_launch(
        LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
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
        write_exit_codes(folder, {rank: one.exitcode for rank, one in error.failures.items()})
        return EXIT_FAILED
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

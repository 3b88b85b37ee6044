"""Run the work of one rank, started by `Launcher`, torchrun or srun, and report its error once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.jobs.processes import REPORT_FOLDER_VARIABLE, die_with_parent, guard_session
from chunkgraph.jobs.reports import (
    describe_error,
    exit_code_of,
    is_usage_error,
    lost_a_peer,
    write_error,
)

__all__ = ["run_rank"]

_WAIT_S = 5.0
"""Time for the launcher to end this rank, if another one explains the failure better."""


def run_rank(work: Callable[[], int], *, debug: bool | None = None) -> int:
    """Do the work of this rank, and end what it started if it dies.

    Args:
        work: Function that returns an exit code.
        debug: Whether to show tracebacks, which `Launcher` appends itself; None: those of errors
            that are not chunkgraph's, as of a script.

    Returns:
        The exit code of the work, or of its error.
    """
    folder = os.environ.get(REPORT_FOLDER_VARIABLE)
    if folder is not None or "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # the parent ends all ranks while it is alive
    end_well = guard_session()
    if folder is not None:
        # Ctrl-C reaches every process of the terminal; only the launcher handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _check_address()
        code = work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        has_traceback = debug and folder is None
        if has_traceback or (debug is None and not isinstance(error, ChunkGraphError)):
            traceback.print_exception(error)
        rank = int(os.environ.get("RANK", "0"))
        if folder is not None:
            return write_error(Path(folder), rank, error)
        _print_once(error, rank)
        return exit_code_of(error)
    if code == 0:
        end_well()
    return code


def _check_address() -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if os.environ.get("WORLD_SIZE", "1") != "1" and not os.environ.get(name):
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, so this process is taken for one rank "
                f"of a job, but {name} is not set. Export the address and port of rank 0, or "
                "start the processes with torchrun, chunkgraph or scripts/."
            )


def _print_once(error: BaseException, rank: int) -> None:
    """Print an error; where all ranks have it in common, on the first of this machine."""
    message = describe_error(error, rank)
    is_of_other = is_usage_error(error) and os.environ.get("LOCAL_RANK", "0") != "0"
    if is_of_other or lost_a_peer(error):
        time.sleep(_WAIT_S)
        if is_of_other:  # it is this rank's own
            message = f"Rank {rank} failed: {message}"
    sys.stderr.write(f"error: {message}\n")

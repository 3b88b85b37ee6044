"""Run the work of one rank and report its error once; no process outlives its run, on Linux."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from chunkgraph.errors import ChunkGraphError, ConfigError
from chunkgraph.jobs.reports import (
    describe_error,
    exit_code_of,
    is_usage_error,
    lost_a_peer,
    write_error,
)

__all__ = [
    "PARENT_PID_VARIABLE",
    "REPORT_FOLDER_VARIABLE",
    "die_with_parent",
    "guard_session",
    "keep_quiet",
    "leave",
    "run_rank",
]

PARENT_PID_VARIABLE = "CHUNKGRAPH_PARENT_PID"
"""Environment variable with the process id of a child's parent."""
REPORT_FOLDER_VARIABLE = "CHUNKGRAPH_REPORT_FOLDER"
"""Environment variable with the folder for the ranks' error files."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_POLL_S = 0.05
_GRACE_S = 1.0
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


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Make the kernel send ``signum`` to this process when its parent dies for any reason.

    Call this first in a child process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    # If the parent died before the call, the kernel sends no signal.
    parent = os.environ.get(PARENT_PID_VARIABLE)
    if signum == signal.SIGKILL and parent is not None and os.getppid() != int(parent):
        os._exit(1)


def guard_session() -> Callable[[], None]:
    """Kill what this process started when it dies for any reason.

    Scripts start processes that outlive a process that is killed or leaves with ``os._exit()``: the
    server of a ``multiprocessing.Manager``, checkpoint writers, data loaders. They hold standard
    output, and perhaps a GPU. A process that leads a session, as the ranks of torchrun and of
    `Launcher` do, forks a guard that sleeps until the process dies, and then ends its group.

    Call this early and in the main thread, since the guard keeps the memory that exists then. It
    does nothing in a process that does not lead a session.

    Returns:
        A function to call after success, which leaves running processes on purpose.
    """
    guarded = os.getpid()
    if sys.platform != "linux" or os.getsid(0) != guarded:
        return lambda: None
    guard = os.fork()
    if guard == 0:
        try:
            _guard(guarded)
        finally:
            os._exit(0)

    def dismiss() -> None:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)

    return dismiss


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown, which may wait for a peer that is gone.

    The guard ends what it started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_quiet() -> None:
    """Silence warnings about packages and torch calls that no user can change."""
    warnings.filterwarnings("ignore", module=r"(megatron|transformer_engine|torch\.distributed)\b")
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _guard(guarded: int) -> None:
    """Sleep until ``guarded``, the parent of this process, is dead; then end its group."""
    os.setsid()  # so that signals to the group do not reach this process
    os.closerange(0, 2**20)  # readers of the guarded process's output see its end
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    die_with_parent(signal.SIGTERM)
    while os.getppid() == guarded:
        signal.sigwait({signal.SIGTERM})
    with suppress(OSError):  # the group is empty
        os.killpg(guarded, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            os.killpg(guarded, 0)
        os.killpg(guarded, signal.SIGKILL)

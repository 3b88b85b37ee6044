"""Tie child processes to their run, so that none of them outlives it. Only on Linux."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

__all__ = [
    "PARENT_PID_VARIABLE",
    "REPORT_FOLDER_VARIABLE",
    "die_with_parent",
    "guard_session",
    "keep_quiet",
    "leave",
]

PARENT_PID_VARIABLE = "CHUNKGRAPH_PARENT_PID"
"""Environment variable with the process id of a child's parent."""
REPORT_FOLDER_VARIABLE = "CHUNKGRAPH_REPORT_FOLDER"
"""Environment variable with the folder for the ranks' error files."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_POLL_S = 0.05
_GRACE_S = 1.0


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

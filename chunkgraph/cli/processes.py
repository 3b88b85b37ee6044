"""Parent and child processes: children that cannot outlive their parent, and their end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

__all__ = ["PARENT_PID_VARIABLE", "die_with_parent", "stop"]

PARENT_PID_VARIABLE = "CHUNKGRAPH_PARENT_PID"
"""Environment variable in which a parent tells its child who started it."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that happens.

    Call it first thing in a child process. Only Linux offers this; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call, and the kernel sends no signal for the past.
    parent = os.environ.get(PARENT_PID_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def stop(process: subprocess.Popen[str], *, grace_s: float = 3.0) -> None:
    """End a process: ask, wait ``grace_s`` seconds, kill. Does nothing to one that has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

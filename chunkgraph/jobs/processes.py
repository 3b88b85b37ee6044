"""Tie child processes to their run, so that none of them outlives it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

__all__ = [
    "PARENT_PID_VARIABLE",
    "REPORT_FOLDER_VARIABLE",
    "die_with_parent",
    "end_session",
    "guard_session",
    "keep_quiet",
    "leave",
    "stop",
]

PARENT_PID_VARIABLE = "CHUNKGRAPH_PARENT_PID"
"""Environment variable with the process id of a child's parent."""
REPORT_FOLDER_VARIABLE = "CHUNKGRAPH_REPORT_FOLDER"
"""Environment variable with the folder for the ranks' process ids and error files."""

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_PR_SET_NAME = 15
_POLL_S = 0.02


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies for any reason.

    Call this first in a child process. It works on Linux; elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call, the kernel sends no signal.
    parent = os.environ.get(PARENT_PID_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def stop(process: subprocess.Popen[str], *, grace_s: float = 3.0) -> None:
    """End a process: terminate, wait ``grace_s`` seconds, kill. Ignore one that has ended."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def guard_session() -> Callable[[], None]:
    """End the rest of this session when this process dies for any reason.

    Scripts start processes that outlive a process that is killed or leaves with ``os._exit()``: the
    server of a ``multiprocessing.Manager``, checkpoint writers, data loaders. They hold standard
    output, and perhaps a GPU. A process that leads a session, as the ranks of torchrun and of
    `jobs.agent` do, forks a guard that sleeps until the process dies and then ends the session.

    Call this early and in the main thread, since the guard keeps the memory that exists then. It
    does nothing in a process that does not lead a session, and on systems other than Linux.

    Returns:
        A function to call after success: processes that are still running are then left on
        purpose, and the guard ends when the interpreter shuts down.
    """
    guarded = os.getpid()
    if not sys.platform.startswith("linux") or os.getsid(0) != guarded:
        return lambda: None
    guard = os.fork()
    if guard == 0:
        try:
            _guard(guarded)
        finally:
            os._exit(0)
    has_ended_well = False

    def dismiss() -> None:
        if has_ended_well and os.getpid() == guarded:  # not in a fork of this process
            with contextlib.suppress(OSError):
                os.kill(guard, signal.SIGKILL)
                os.waitpid(guard, 0)

    def end_well() -> None:
        nonlocal has_ended_well
        has_ended_well = True

    atexit.register(dismiss)  # registered before other modules' callbacks, so it runs after them
    return end_well


def end_session(leader: int, *, grace_s: float = 3.0) -> None:
    """End the processes that ``leader`` started in its session: terminate, wait, kill.

    The leader itself and processes that lead their own sessions stay.

    Args:
        leader: Process id. After its death only a session that it led is found.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """
    for signum in (signal.SIGTERM, signal.SIGKILL):
        signalled: set[int] = set()
        deadline = time.monotonic() + grace_s
        while (members := _started_by(leader)) and time.monotonic() < deadline:
            for pid in members - signalled:
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
            signalled |= members
            time.sleep(_POLL_S)


def leave(code: int) -> NoReturn:
    """End this process and its children in the session, without the interpreter's shutdown.

    The shutdown would wait for threads of process groups whose peers may be gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getsid(0) != os.getpid():  # so the session has no guard
        end_session(os.getpid())
    os._exit(code)


def keep_quiet() -> None:
    """Silence warnings about packages and torch calls that no user can change."""
    warnings.filterwarnings("ignore", module=r"(megatron|transformer_engine|torch\.distributed)\b")
    warnings.filterwarnings(
        "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
    )
    logging.getLogger("megatron").setLevel(logging.ERROR)


def _guard(guarded: int) -> None:
    """Sleep until ``guarded``, the parent of this process, is dead; then end its session."""
    os.setsid()  # so that signals to the group do not reach this process
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _prctl(_PR_SET_NAME, b"session-guard")
    _release_files()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    while os.getppid() == guarded:
        signal.sigwait({signal.SIGTERM})
    end_session(guarded)


def _release_files() -> None:
    """Close all files, so that readers of the guarded process's output see its end."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def _started_by(leader: int) -> set[int]:
    """Find the living members of the session of ``leader``, or its descendants in its session.

    Neither the leader nor this process is among them.
    """
    parents, sessions = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may contain any character: state, parent, group, session.
            state, parent, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                pid = int(path.parent.name)
                parents[pid], sessions[pid] = int(parent), int(session)
    family = {pid for pid, session in sessions.items() if session == leader}
    family.add(leader)
    while more := {
        pid
        for pid, parent in parents.items()
        if parent in family and pid not in family and sessions[pid] == sessions.get(leader)
    }:
        family |= more
    return family - {leader, os.getpid()}


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(option, argument, 0, 0, 0)

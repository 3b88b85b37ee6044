"""Run the work of one rank, and report its error once; on Linux no process outlives its run.

A rank of `Launcher` writes its error to a file, from which the launcher tells which failure caused
the others.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from chunkgraph._text import escape
from chunkgraph.errors import ChunkGraphError, WorkerError, describe_loss

PARENT_PID_VARIABLE = "CHUNKGRAPH_PARENT_PID"
"""Environment variable with the process id of a child's parent."""
REPORT_FOLDER_VARIABLE = "CHUNKGRAPH_REPORT_FOLDER"
"""Environment variable with the folder for the ranks' error files."""

EXIT_FAILED = 1
"""The run failed."""
EXIT_USAGE = 2
"""The configuration or the command line is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run."""

_FOLLOWS = "another rank"
_SIGNAL_ADVICE: dict[int, str] = {
    signal.SIGKILL: "The system does this if memory runs out: try a smaller model, sequence or "
    "micro batch.",
    signal.SIGTERM: "Another program sent it, such as the batch system: look in its log.",
}

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
    rank = 0
    try:
        rank = int(os.environ.get("RANK", "0"))
        code = work()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        has_traceback = debug and folder is None
        if has_traceback or (debug is None and not isinstance(error, ChunkGraphError)):
            traceback.print_exception(error)
        if folder is not None:
            return write_error(Path(folder), rank, error)
        _print_once(error, rank)
        return exit_code_of(error)
    if code == 0:
        end_well()
    return code


def _print_once(error: BaseException, rank: int) -> None:
    """Print an error; where all ranks have it in common, on the first of this machine."""
    message = describe_error(error, rank)
    is_of_other = exit_code_of(error) == EXIT_USAGE and os.environ.get("LOCAL_RANK", "0") != "0"
    if is_of_other or (_FOLLOWS in message and not isinstance(error, WorkerError)):
        time.sleep(_WAIT_S)
        if is_of_other:  # it is this rank's own
            message = f"Rank {rank} failed: {message}"
    sys.stderr.write(f"error: {escape(message)}\n")


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
    with suppress(OSError):  # the disk is full, or the reader is gone
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
    while os.getppid() == guarded and not _is_stopped_for_good(guarded):
        signal.sigtimedwait({signal.SIGTERM}, _GRACE_S)
    with suppress(OSError):  # the group is empty
        os.killpg(guarded, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)
            os.killpg(guarded, 0)
        os.killpg(guarded, signal.SIGKILL)


def _is_stopped_for_good(pid: int) -> bool:
    """Return whether a process is stopped and cannot end by a SIGTERM, as from torchrun."""
    with suppress(OSError):  # it has ended
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
        return "State:\tT" in status and bool(pending >> (signal.SIGTERM - 1) & 1)
    return False


def kill_stopped_ranks() -> None:
    """Kill the ranks of this machine that are stopped, if torchrun started them.

    Otherwise torchrun, which ends all ranks after the first error, waits half a minute for them.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state == "T" and int(parent) == os.getppid():
                sys.stderr.write(f"Killing process {path.parent.name}, a rank that is stopped.\n")
                os.kill(int(path.parent.name), signal.SIGKILL)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    return int(getattr(error, "exit_code", EXIT_FAILED))


def write_error(folder: Path, rank: int, error: BaseException) -> int:
    """Write a rank's message, a blank line and the traceback; return the exit code of the error."""
    message = describe_error(error, rank)
    text = f"{message}\n\n{''.join(traceback.format_exception(error))}"
    partial = folder / f".error_rank{rank}.txt.{os.getpid()}"
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(folder / f"error_rank{rank}.txt")
    except OSError as full:
        sys.stderr.write(f"error: {message} (Not in {folder}: {full.strerror}.)\n")
    return exit_code_of(error)


def describe_error(error: BaseException, rank: int) -> str:
    """Describe an error in one paragraph that names the rank, without a traceback."""
    text = ""
    with suppress(Exception):  # of a class whose own text fails
        text = str(error)
    if type(error).__name__ == "CheckpointException":  # torch's; its text is the ranks' tracebacks
        causes = [(at, cause) for at, (cause, _) in getattr(error, "failures", {}).items()]
        text = "; ".join(f"on rank {at}, {type(cause).__name__}: {cause}" for at, cause in causes)
    # A blank line would end the message in the error file.
    text = "\n".join(line for line in text.splitlines() if line.strip())
    text = text.strip() or type(error).__name__
    if loss := describe_loss(error, text, rank):
        return loss
    if not isinstance(error, ChunkGraphError):
        text = f"{type(error).__name__}: {text}"
    elif exit_code_of(error) == EXIT_USAGE or text.lower().startswith("rank"):
        return text  # a setting concerns all ranks
    return f"Rank {rank} failed: {text}"


def follows_from_another(folder: Path, rank: int) -> bool:
    """Return True if a rank reported that it failed because another rank did."""
    return _FOLLOWS in _report(folder, rank)[0]


def first_failure(
    folder: Path,
    exit_codes: Mapping[int, int],
    *,
    running: Mapping[int, str] = MappingProxyType({}),
    debug: bool = False,
) -> WorkerError:
    """Return the failure that caused the others as an error that names the rank.

    Args:
        folder: The run folder with the reports of the ranks.
        exit_codes: Exit codes of the ranks that failed by themselves, in this order; signals are
            negative.
        running: Ranks that had not ended by then, and the name of a signal that had stopped them.
        debug: Whether the rank's traceback is appended.
    """
    causes = [rank for rank in exit_codes if not follows_from_another(folder, rank)]
    rank = causes[0] if causes else next(iter(exit_codes))
    code = exit_codes[rank]
    message, details = _report(folder, rank)
    message = message or _without_report(rank, code)
    if stopped := [f"rank {at} by {name}" for at, name in running.items() if name]:
        message += f" Did not answer, since a debugger or a user stopped it: {', '.join(stopped)}."
    elif not causes:
        waited_for = ", ".join(map(str, running)) or "none"
        message += f" No rank failed before it; ranks that had not ended: {waited_for}."
    message = f"{message}\n{details}" if debug and details else message
    return WorkerError(message, exit_code=max(code, EXIT_FAILED))


def _report(folder: Path, rank: int) -> tuple[str, str]:
    """Return a rank's message and traceback; empty if it wrote none."""
    path = folder / f"error_rank{rank}.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    message, _, details = text.partition("\n\n")
    return message, details


def _without_report(rank: int, code: int) -> str:
    if code > 0:
        return f"Rank {rank} ended with exit code {code} and left no message; see its output."
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    advice = _SIGNAL_ADVICE.get(-code, "Run again with --debug for more.")
    return f"Rank {rank} was killed by signal {-code} ({name}). {advice}"

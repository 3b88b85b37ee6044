"""Exit codes, and the error files of ranks: what they say about the failure of a job."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from chunkgraph.errors import ChunkGraphError, WorkerError

__all__ = [
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_USAGE",
    "describe_error",
    "exit_code_of",
    "first_failure",
    "follows_from_another",
    "is_usage_error",
    "lost_a_peer",
    "write_error",
]

EXIT_FAILED = 1
"""The run failed."""
EXIT_USAGE = 2
"""The configuration or the command line is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run."""

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
    "Application timeout",
)
_SIGNAL_ADVICE: dict[int, str] = {
    signal.SIGKILL: "The system does this if memory runs out: try a smaller model, sequence or "
    "micro batch.",
    signal.SIGTERM: "Another program sent it, such as the batch system: look in its log.",
}


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    return int(getattr(error, "exit_code", EXIT_FAILED))


def is_usage_error(error: BaseException) -> bool:
    """Return True if the user has to change a setting or a file, or install a package."""
    return exit_code_of(error) == EXIT_USAGE


def _error_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's error file: the message, a blank line, the traceback."""
    return folder / f"error_rank{rank}.txt"


def write_error(folder: Path, rank: int, error: BaseException) -> int:
    """Write a rank's error file, whole or not at all; return the exit code for the error."""
    text = f"{describe_error(error, rank)}\n\n{''.join(traceback.format_exception(error))}"
    partial = folder / f".error_rank{rank}.txt.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    partial.replace(_error_path(folder, rank))
    return exit_code_of(error)


def lost_a_peer(error: BaseException) -> bool:
    """Return True if an error only reports that another rank ended."""
    return not isinstance(error, ChunkGraphError) and any(sign in str(error) for sign in _LOST_PEER)


def describe_error(error: BaseException, rank: int) -> str:
    """Describe an error in one paragraph that names the rank, without a traceback."""
    text = str(error)
    if type(error).__name__ == "CheckpointException":  # torch's; its text is the ranks' tracebacks
        causes = [(at, cause) for at, (cause, _) in getattr(error, "failures", {}).items()]
        text = "; ".join(f"on rank {at}, {type(cause).__name__}: {cause}" for at, cause in causes)
    # A blank line would end the message in the error file.
    text = "\n".join(line for line in text.splitlines() if line.strip())
    text = text.strip() or type(error).__name__
    if lost_a_peer(error):
        return (
            f"Rank {rank} stopped because another rank ended or did not answer in time "
            f"({text.splitlines()[0]})."
        )
    if not isinstance(error, ChunkGraphError):
        text = f"{type(error).__name__}: {text}"
    elif is_usage_error(error) or text.lower().startswith("rank"):  # a setting concerns all ranks
        return text
    return f"Rank {rank} failed: {text}"


def follows_from_another(folder: Path, rank: int) -> bool:
    """Return True if a rank reported that it failed because another rank did."""
    return "another rank" in _report(folder, rank)[0]


def first_failure(
    folder: Path,
    exit_codes: Mapping[int, int],
    *,
    running: Sequence[int] = (),
    debug: bool = False,
) -> WorkerError:
    """Return the failure that caused the others as an error that names the rank.

    Args:
        folder: The run folder with the reports of the ranks.
        exit_codes: Exit codes of the ranks that failed by themselves, in this order; signals are
            negative.
        running: Ranks that had not ended by then.
        debug: Whether the rank's traceback is appended.
    """
    causes = [rank for rank in exit_codes if not follows_from_another(folder, rank)]
    rank = causes[0] if causes else next(iter(exit_codes))
    code = exit_codes[rank]
    message, details = _report(folder, rank)
    if not message:
        return WorkerError(_without_report(rank, code), exit_code=max(code, EXIT_FAILED))
    if not causes:
        waited_for = ", ".join(map(str, running)) or "none"
        message += f" No rank failed before it; ranks that had not ended: {waited_for}."
    message = f"{message}\n{details}" if debug else message
    return WorkerError(message, exit_code=max(code, EXIT_FAILED))


def _report(folder: Path, rank: int) -> tuple[str, str]:
    """Return a rank's message and traceback; empty if it wrote none."""
    path = _error_path(folder, rank)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    message, _, details = text.partition("\n\n")
    return message, details


def _without_report(rank: int, code: int) -> str:
    if code > 0:
        return f"Rank {rank} ended with exit code {code} and left no message; see its output."
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    advice = _SIGNAL_ADVICE.get(-code, "Run again with --debug for more.")
    return f"Rank {rank} was killed by signal {-code} ({name}). {advice}"

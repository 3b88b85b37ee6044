"""Explain why a job failed, from the exit codes and the messages of its ranks."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chunkgraph.errors import ChunkGraphError, ConfigError, WorkerError
from chunkgraph.jobs.exit_codes import EXIT_FAILED, EXIT_USAGE
from chunkgraph.jobs.reports import error_path, rank_prefix, write_whole

__all__ = ["Failure", "first_failure", "read_exit_codes", "write_exit_codes"]

_FILE = "failures.json"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ended a job, not those that it caused on other ranks."""

    message: str
    """The message for the user."""
    exit_code: int = EXIT_FAILED
    """Exit code of the rank that failed first."""
    details: str = ""
    """The rank's traceback, if it left one."""
    is_silent: bool = False
    """True if a rank ended without a message."""

    def error(self, *, debug: bool = False) -> ChunkGraphError:
        """Return the failure as an exception, with the rank's traceback for ``debug``."""
        message = f"{self.message}\n{self.details}" if debug and self.details else self.message
        is_usage = self.exit_code == EXIT_USAGE and not self.is_silent
        return ConfigError(message) if is_usage else WorkerError(message)


def write_exit_codes(folder: Path, exit_codes: Mapping[int, int]) -> None:
    """Write the exit codes of the ranks that failed, by rank; signals are negative."""
    write_whole(folder / _FILE, json.dumps(list(exit_codes.items())))


def read_exit_codes(folder: Path) -> dict[int, int]:
    """Read the exit codes of the ranks that failed, by rank; signals are negative."""
    path = folder / _FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def first_failure(
    folder: Path, num_ranks: int, agent_exit_code: int, *, last_event: str = ""
) -> Failure:
    """Find the failure that came first.

    Args:
        folder: The run folder with the reports of the agent and the ranks.
        num_ranks: Number of ranks in the job.
        agent_exit_code: Exit code of the agent that ran them.
        last_event: Description of the ranks' last progress, if they report any.
    """
    exit_codes = read_exit_codes(folder)
    last = f"; last event: {last_event}" if last_event else ""
    for rank, code in exit_codes.items():
        # The agent ends the other ranks with SIGTERM, which is not the cause.
        if code < 0 and code != -signal.SIGTERM:
            message = (
                f"Rank {rank} was killed by signal {-code} ({_signal_name(-code)}){last}. "
                f"The other ranks were ended. {_signal_advice(-code)}"
            )
            return Failure(message=message)
    paths = {rank: path for rank in range(num_ranks) if (path := error_path(folder, rank)).exists()}
    if paths:
        rank = min(paths, key=lambda rank: _order(paths[rank]))
        message, _, details = paths[rank].read_text(encoding="utf-8").partition("\n\n")
        exit_code = exit_codes.get(rank, EXIT_FAILED)
        if exit_code == EXIT_USAGE:  # a wrong setting concerns all ranks
            message = message.removeprefix(rank_prefix(rank))
        return Failure(message=message, exit_code=exit_code, details=details)
    for rank, code in exit_codes.items():
        message = f"Rank {rank} ended with exit code {code} and left no message; see its output."
        return Failure(message=message, exit_code=code, is_silent=True)
    return Failure(
        message=f"The agent of the ranks ended with exit code {agent_exit_code} before they "
        f"did{last}. Run again with --debug to see its log."
    )


def _order(path: Path) -> tuple[bool, int]:
    """Sort messages by time; those that only follow from another rank's failure come last."""
    message = path.read_text(encoding="utf-8").partition("\n\n")[0]
    return "another rank" in message, path.stat().st_mtime_ns


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _signal_advice(number: int) -> str:
    if number == signal.SIGKILL:
        return (
            "The system does this if memory runs out: try a smaller model, sequence or micro batch."
        )
    return "Run again with --debug for more."

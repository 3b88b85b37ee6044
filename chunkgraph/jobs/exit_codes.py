"""Exit codes of the command, its launchers and its ranks."""

from __future__ import annotations

from chunkgraph.errors import ConfigError, MissingDependencyError, ScheduleError, WorkerError

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_USAGE", "exit_code_of", "is_usage_error"]

EXIT_FAILED = 1
"""The run failed."""
EXIT_USAGE = 2
"""The configuration or the command line is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run."""


def is_usage_error(error: BaseException) -> bool:
    """Return True if the user has to change a setting or a file, or install a package."""
    return isinstance(error, (ConfigError, MissingDependencyError, ScheduleError))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    if isinstance(error, WorkerError):
        return error.exit_code
    return EXIT_USAGE if is_usage_error(error) else EXIT_FAILED

"""Exit codes of the command, its launchers and its ranks."""

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_USAGE", "exit_code_of", "is_usage_error"]

EXIT_FAILED = 1
"""The run failed."""
EXIT_USAGE = 2
"""The configuration or the command line is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with ``error``."""
    return int(getattr(error, "exit_code", EXIT_FAILED))


def is_usage_error(error: BaseException) -> bool:
    """Return True if the user has to change a setting or a file, or install a package."""
    return exit_code_of(error) == EXIT_USAGE

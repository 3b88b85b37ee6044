"""Write results to files, which are checked before the run.

``-`` is standard output, which then receives nothing but the result.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError, OutputError


def output_file(text: str) -> Path:
    """Return the path of a file to write; the argparse ``type`` of such an option.

    Raises:
        ArgumentTypeError: The text cannot name a file.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a file, or - for standard output")
    if text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{shorten(text)} is a folder; give a file in it")
    if text.endswith((".yaml", ".yml", ".py")):  # what follows an option without its file
        raise argparse.ArgumentTypeError(
            f"{shorten(text)} is not a file for results. Name one, or - for standard output."
        )
    return Path(text)


def check_output(option: str, path: Path | None) -> None:
    """Check that a result can be written now.

    Args:
        option: Name of the option, for errors.
        path: The file; None if the option was not used.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        return
    problem = ""
    try:
        if is_stdout(path):
            problem = "standard output is closed" if sys.stdout is None else ""
        elif path.is_dir():
            problem = "is a folder"
        elif not path.parent.is_dir():
            problem = f"the folder {shorten(str(path.parent))} does not exist"
        elif path.is_file() or not path.exists():  # a pipe may wait for its reader
            is_new = not path.exists()
            path.open("ab").close()
            if is_new:
                path.resolve().unlink()
    except (OSError, ValueError) as error:
        problem = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if problem:
        raise ConfigError(f"{option} {shorten(str(path))}: {problem}. Give another file.")


def write_output(option: str, path: Path, content: str | bytes) -> None:
    """Write a result.

    Raises:
        OutputError: The file cannot be written any more, for example because the disk is full.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    try:
        if is_stdout(path):
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        else:
            path.write_bytes(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"{option} {shorten(str(path))}: cannot be written: {error.strerror or error}. "
            "Name another file."
        ) from None


def is_stdout(path: Path) -> bool:
    """Return whether ``path`` is ``-`` or names standard output's file, like ``/dev/stdout``."""
    if str(path) == "-":
        return True
    try:
        target, stdout = os.stat(path), os.fstat(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # no such file, or standard output is not a file
        return False
    is_device = stat.S_ISCHR(stdout.st_mode) or stat.S_ISBLK(stdout.st_mode)
    return os.path.samestat(target, stdout) and not is_device


def stream_next_to(*paths: Path | None) -> TextIO:
    """Return the stream for human readers: standard output, unless a result goes there."""
    return sys.stderr if any(path and is_stdout(path) for path in paths) else sys.stdout


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Send what libraries and processes print to standard error, not to the report's stream."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
        sys.stdout.flush()
    finally:
        os.dup2(saved, 1)
        os.close(saved)

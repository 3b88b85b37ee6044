"""Write results to files, which are checked before the run.

A file appears whole or not at all. Only regular files are replaced: devices and pipes are written
in place, and links stay. ``-`` is standard output, which then receives nothing but the result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import TextIO

from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError, OutputError

__all__ = [
    "check_output",
    "is_stdout",
    "output_file",
    "stream_next_to",
    "write_output",
]


def output_file(text: str) -> Path:
    """Return the path of a file to write; the argparse ``type`` of such an option.

    Raises:
        ArgumentTypeError: The text cannot name a file.
    """
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a file, or - for standard output")
    if text.endswith("/"):
        raise argparse.ArgumentTypeError(f"{shorten(text)} is a folder; give a file in it")
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
    try:
        problem = _problem(path)
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
            _write_stdout(data)
        elif _is_replaceable(path):
            _replace(path, data)
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


def _problem(path: Path) -> str:
    """Return why a file cannot be written; "" if it can."""
    if is_stdout(path):
        return "standard output is closed" if sys.stdout is None else ""
    mode = _mode(path)
    if mode is None:
        target = _target(path)
        if not target.parent.is_dir():
            return f"the folder {shorten(str(target.parent))} does not exist"
        # Only creating a file shows for sure that the folder is writable.
        descriptor, temporary = _temporary(target)
        os.close(descriptor)
        temporary.unlink()
    elif stat.S_ISDIR(mode):
        return "is a folder"
    elif stat.S_ISSOCK(mode):
        return "is a socket, which is not written like a file"
    elif not os.access(path, os.W_OK):
        return "there is no permission to write it"
    return ""


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _write_stdout(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.flush()


def _is_replaceable(path: Path) -> bool:
    mode = _mode(path)
    if mode is None:
        return True
    return stat.S_ISREG(mode) and os.access(_target(path).parent, os.W_OK)


def _replace(path: Path, data: bytes) -> None:
    target, mode = _target(path), _mode(path)
    descriptor, temporary = _temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if mode is not None:
                os.chmod(descriptor, stat.S_IMODE(mode))
        try:
            temporary.replace(target)
        except OSError:  # the file is a mount, for one
            target.write_bytes(data)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _target(path: Path) -> Path:
    """Return the path with all links resolved."""
    return Path(os.path.realpath(path))


def _temporary(target: Path) -> tuple[int, Path]:
    """Create a file next to the target, with default permissions; return descriptor and path."""
    name = f".chunkgraph-{os.getpid()}-{os.urandom(4).hex()}.tmp"
    path = target.with_name(name)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), path

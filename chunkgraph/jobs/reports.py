"""What a rank leaves in the run folder: its progress, and one message if it fails."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkgraph.errors import ChunkGraphError, ConfigError, MissingDependencyError

__all__ = ["append_progress", "describe_error", "lost_a_peer", "write_error", "write_whole"]

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
    "Application timeout",
)


def write_error(folder: Path, rank: int, error: Exception) -> int:
    """Leave one clear message, an empty line and the traceback; returns the exit code for it."""
    text = f"{describe_error(error, rank)}\n\n{''.join(traceback.format_exception(error))}"
    write_whole(folder / f"error_rank{rank}.txt", text)
    usage = isinstance(error, (ConfigError, MissingDependencyError))
    return _EXIT_USAGE if usage else _EXIT_FAILED


def append_progress(path: Path) -> Callable[[dict[str, Any]], None]:
    """A progress callback that appends each line to a file, as JSON."""

    def append(line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return append


def lost_a_peer(error: Exception) -> bool:
    """Whether an error is only what another rank's end looks like from here."""
    return not isinstance(error, ChunkGraphError) and any(sign in str(error) for sign in _LOST_PEER)


def describe_error(error: Exception, rank: int) -> str:
    """One message that names the rank, for those who read no tracebacks."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ChunkGraphError):
        return text if text.lower().startswith("rank") else f"Rank {rank}: {text}"
    first = text.splitlines()[0]
    if lost_a_peer(error):
        return (
            f"Rank {rank} stopped because another rank ended or did not answer in time "
            f"({first}). The cause is in that rank's error file or log."
        )
    return f"Rank {rank} failed: {type(error).__name__}: {first}"


def write_whole(path: Path, text: str) -> None:
    """Write through a temporary file, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)

"""Write a rank's files in the run folder: its progress, and one message if it fails."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkgraph.errors import ChunkGraphError
from chunkgraph.jobs.exit_codes import exit_code_of

__all__ = [
    "append_progress",
    "describe_error",
    "error_path",
    "lost_a_peer",
    "rank_prefix",
    "write_error",
    "write_whole",
]

_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out",
    "Application timeout",
)


def error_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's error file: the message, a blank line, the traceback."""
    return folder / f"error_rank{rank}.txt"


def write_error(folder: Path, rank: int, error: Exception) -> int:
    """Write a rank's error file; return the exit code for the error."""
    text = f"{describe_error(error, rank)}\n\n{''.join(traceback.format_exception(error))}"
    write_whole(error_path(folder, rank), text)
    return exit_code_of(error)


def append_progress(path: Path) -> Callable[[dict[str, Any]], None]:
    """Return a progress callback that appends each line to a file, as JSON."""

    def append(line: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    return append


def lost_a_peer(error: Exception) -> bool:
    """Return True if an error only reports that another rank ended."""
    return not isinstance(error, ChunkGraphError) and any(sign in str(error) for sign in _LOST_PEER)


def rank_prefix(rank: int) -> str:
    """Return the words that begin a rank's message, unless the error itself names the rank."""
    return f"Rank {rank} failed: "


def describe_error(error: Exception, rank: int) -> str:
    """Describe an error in one paragraph that names the rank, without a traceback."""
    # A blank line would end the message in the error file.
    text = "\n".join(line for line in str(error).splitlines() if line.strip())
    text = text.strip() or type(error).__name__
    if lost_a_peer(error):
        return (
            f"Rank {rank} stopped because another rank ended or did not answer in time "
            f"({text.splitlines()[0]}). The cause is in that rank's error file or log."
        )
    if not isinstance(error, ChunkGraphError):
        return f"{rank_prefix(rank)}{type(error).__name__}: {text}"
    return text if text.lower().startswith("rank") else f"{rank_prefix(rank)}{text}"


def write_whole(path: Path, text: str) -> None:
    """Write a file through a temporary one, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)

"""Read the files that users name: regular files of a limited size."""

from __future__ import annotations

from pathlib import Path

from chunkgraph._text import shorten
from chunkgraph.errors import ConfigError


def read_input(
    path: str | Path, what: str, advice: str, max_bytes: int, *, is_whole: bool = True
) -> bytes:
    """Read a file of at most ``max_bytes``, or only so many bytes of it.

    Raises:
        ConfigError: It is larger, not a regular file, or cannot be read; says ``what`` it holds.
    """
    why = "it is not a regular file"
    try:
        # A device never ends, and a pipe without a writer never begins.
        if Path(path).is_file() or Path(path).is_dir() or not Path(path).exists():
            with Path(path).open("rb") as stream:
                content = stream.read(max_bytes + is_whole)
            if len(content) <= max_bytes:
                return content
            why = f"it is larger than {max_bytes} bytes"
    except (OSError, ValueError) as error:
        why = (getattr(error, "strerror", None) or str(error)).rstrip(".")
    raise ConfigError(f"{shorten(str(path))}: cannot read {what}: {why}. {advice}")

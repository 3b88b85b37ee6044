"""The outermost frame of a training process: ``python -m ... TARGET CONFIG RUN_DIR``.

It ties the process to its parent, calls the target (``package.module:function``) with the two
paths, and leaves the reason of a failure where the launcher looks for it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from chunkgraph.errors import ChunkGraphError, ConfigError, MissingDependencyError
from chunkgraph.jobs.processes import die_with_parent, guard_session, leave

__all__ = ["EXIT_USAGE", "error_path", "main"]

EXIT_USAGE = 2
"""Exit code of a worker that found the configuration, not the run, at fault."""


def error_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's failure is described: the message, a blank line, the traceback."""
    return run_dir / f"error_rank{rank}.txt"


def main(target: str, config_path: str, run_dir: str) -> int:
    """Call the target; returns its exit code, or 1 or 2 after writing down why it failed."""
    die_with_parent()
    guard_session()
    # Ctrl-C reaches the whole terminal; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        with (Path(run_dir) / "progress.jsonl").open("a", encoding="utf-8") as progress:
            progress.write(json.dumps({"event": "started"}) + "\n")
    try:
        module_name, _, function_name = target.partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        return int(function(config_path, run_dir))
    except Exception as error:  # noqa: BLE001 - the last frame: everything is reported
        _write_error(error_path(Path(run_dir), rank), error)
        return EXIT_USAGE if isinstance(error, (ConfigError, MissingDependencyError)) else 1


def _write_error(path: Path, error: Exception) -> None:
    """Describe a failure, unless the target has already done so."""
    if path.exists():
        return
    message = str(error) or type(error).__name__
    if not isinstance(error, ChunkGraphError):
        message = f"{type(error).__name__}: {message}"
    # One paragraph: the blank line ends the message.
    message = "\n".join(line for line in message.splitlines() if line.strip())
    temporary = path.with_suffix(".tmp")
    temporary.write_text(
        f"{message}\n\n{''.join(traceback.format_exception(error))}", encoding="utf-8"
    )
    temporary.replace(path)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))

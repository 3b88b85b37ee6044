"""The entry point of a training process: ``python -m ... TARGET CONFIG RUN_DIR``.

It ties the process to its parent, calls the target (``package.module:function``) with the two
paths, and writes the reason of a failure for the launcher.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

from chunkgraph.jobs.processes import die_with_parent, guard_session, leave
from chunkgraph.jobs.reports import write_error

__all__ = ["main"]


def main(target: str, config_path: str, run_dir: str) -> int:
    """Call the target; return its exit code, or 1 or 2 after writing why it failed."""
    die_with_parent()
    guard_session()
    # Ctrl-C reaches the whole terminal; only the launcher handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        module_name, _, function_name = target.partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        return int(function(config_path, run_dir))
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return write_error(Path(run_dir), int(os.environ.get("RANK", "0")), error)


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))

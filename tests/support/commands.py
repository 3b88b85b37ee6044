"""Commands that tests run to their end, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
"""Arguments of `python` that start two ranks; the port and the script follow."""


def finished(
    command: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 60.0,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command; return its output as text, and its exit code, which may be any."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def python(
    *arguments: str | Path, timeout_s: float = 60.0, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python, which finds the package unless ``PYTHONPATH`` is among the variables."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return finished([sys.executable, *arguments], env, timeout_s=timeout_s, cwd=cwd)


def output_of_python(*arguments: str | Path, timeout_s: float = 60.0, **variables: str) -> str:
    """Return what `python` prints, which must succeed."""
    done = python(*arguments, timeout_s=timeout_s, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout

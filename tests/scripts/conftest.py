"""Fixtures of the tests of scripts/: a stand-in for Megatron's launcher, marked processes."""

from __future__ import annotations

import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MARK = "CHUNKGRAPH_TEST_MARK"

LAUNCH = """
import runpy, sys
from chunkgraph.jobs.processes import die_with_parent
die_with_parent()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def package_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the package, whose Megatron launcher only runs the script."""
    folder = tmp_path_factory.mktemp("package")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "chunkgraph", folder / "chunkgraph", ignore=ignored)
    (folder / "chunkgraph" / "launch" / "__main__.py").write_text(LAUNCH)
    return folder


class Marked:
    """The environment of a test's commands, which identifies all processes that they start."""

    def __init__(self, path: Path) -> None:
        # The working directory: Python searches it for modules before PYTHONPATH.
        self.folder = path
        self.mark = uuid.uuid4().hex
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CHUNKGRAPH_", "SLURM_", "SBATCH_", "SRUN_"))
        }
        self.environment = {**clean, MARK: self.mark, "PYTHONPATH": str(path), "COLUMNS": "80"}

    def processes(self) -> list[int]:
        """Return the pids of living processes with the mark."""
        variable, pids = f"{MARK}={self.mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if variable not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    pids.append(int(folder.name))
            except OSError:  # it ended, or is another user's
                continue
        return pids

    def is_alone(self, within_s: float = 30.0) -> bool:
        """Return whether all processes of the commands end in time."""
        end = time.monotonic() + within_s
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


@pytest.fixture
def marked(package_path: Path) -> Iterator[Marked]:
    """Make a new mark; end the marked processes that a failed test leaves."""
    mark = Marked(package_path)
    yield mark
    for pid in mark.processes():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, or fail after a minute."""

    def wait(condition: Callable[[], bool], within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.05)

    return wait

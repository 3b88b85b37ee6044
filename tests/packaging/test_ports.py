"""Ports of jobs: no two test processes get the same one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_two_test_processes_have_no_port_in_common(
    free_port: Callable[[], int], tmp_path: Path
) -> None:
    other = tmp_path / "test_other.py"
    other.write_text(
        "def test(free_port):\n    print('PORTS', *{free_port() for _ in range(300)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "conftest", str(other)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [text for text in done.stdout.splitlines() if text.startswith("PORTS")]
    ports = set(map(int, line.split()[1:]))
    assert len(ports) > 1
    assert ports.isdisjoint({free_port() for _ in range(300)})

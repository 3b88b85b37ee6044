"""A test that holds Python's lock for ever is ended; pytest-timeout cannot do this."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
STUCK = """
import ctypes, importlib.util, sys

spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
with conftest.hard_limit(30.0):
    pass
with conftest.hard_limit(0.5):
    {}
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stays", "code"),
    # PyDLL calls C without releasing the lock.
    [("ctypes.PyDLL(None).sleep(50)", 1), ("ctypes.CDLL(None).sleep(0)", 0)],
    ids=["stuck", "done"],
)
def test_a_process_that_is_stuck_ends(stays: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(stays), str(CONFTEST)],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert ("Timeout (0:00:00.5" in done.stderr) == bool(code)
    assert ('File "<string>", line ' in done.stderr) == bool(code)

"""What the tests of processes share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def has_ended() -> Callable[[int], bool]:
    """Whether a process ends within half a minute."""
    return _has_ended


def _has_ended(pid: int, within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            # A zombie has ended; where no init reaps it, its entry stays.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False

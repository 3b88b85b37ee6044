"""The code in the docs runs unchanged and does what the docs promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "slots.md"


@pytest.mark.slow
def test_the_example_runs_and_its_counts_are_right(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True
    )
    captures, replays = re.search(r"(\d+) captures, (\d+) replays, no fallbacks", code).groups()
    assert f"captures={captures}," in done.stdout
    assert f" replays={replays}," in done.stdout
    assert "fallbacks" not in done.stdout  # counts of nothing are left out
    assert len([line for line in code.splitlines() if line.strip()]) <= 25

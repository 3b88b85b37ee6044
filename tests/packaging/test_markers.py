"""`make test` and `make test-slow` run every test, in one environment or in both."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_runs_leave_out_what_the_fixtures_take_for_left_out(
    pytestconfig: pytest.Config,
) -> None:
    """The suite's conftest recognises the run with the oldest release by its expression."""
    runs = re.findall(r"\$\(PYTEST\) -m \"(.+)\"", (ROOT / "Makefile").read_text(encoding="utf-8"))
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    newest = [run for run in runs if run != conftest._OLDEST]
    assert len(runs) == len(newest) + 1
    assert conftest._SHORT in newest
    for megatron, every_release, slow in itertools.product((False, True), repeat=3):
        marks = {"megatron": megatron or every_release, "every_release": every_release}
        marks["slow"] = slow
        is_twice = every_release and not slow  # then with all cases
        assert sum(eval(run, {}, marks) for run in newest) == 1 + is_twice
        is_repeated = every_release or not (megatron or slow)
        assert eval(conftest._OLDEST, {}, marks) == is_repeated

"""Which of several failures ended a job."""

from __future__ import annotations

from pathlib import Path

from chunkgraph.errors import CaptureError, ConfigError
from chunkgraph.jobs.reports import first_failure, write_error


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    write_error(tmp_path, 0, RuntimeError("Connection reset by peer"))
    write_error(tmp_path, 3, CaptureError("model.py:12: .item()"))
    error = first_failure(tmp_path, {0: 1, 3: 1})
    assert str(error) == "Rank 3 failed: model.py:12: .item()"
    killed = first_failure(tmp_path, {0: 1, 2: -6, 3: 1})
    assert str(killed).startswith("Rank 2 was killed by signal 6 (SIGABRT). ")


def test_of_two_causes_the_first_counts(tmp_path: Path) -> None:
    write_error(tmp_path, 1, ConfigError("model.layers: not a number."))
    write_error(tmp_path, 2, ValueError("one\n\ntwo"))
    assert str(first_failure(tmp_path, {2: 1, 1: 2})) == "Rank 2 failed: ValueError: one\ntwo"
    wrong = first_failure(tmp_path, {1: 2, 2: 1})
    assert (str(wrong), wrong.exit_code) == ("model.layers: not a number.", 2)

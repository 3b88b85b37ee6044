"""Explanations of a job's failures."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from chunkgraph.errors import CaptureError, ConfigError, WorkerError
from chunkgraph.jobs.exit_codes import EXIT_FAILED, EXIT_USAGE
from chunkgraph.jobs.failures import Failure, first_failure, write_exit_codes
from chunkgraph.jobs.reports import error_path, write_error


def failure_of(folder: Path, errors: dict[int, Exception], **killed: int) -> Failure:
    """Return the failure of a job whose ranks wrote these errors, in this order."""
    codes = {rank: write_error(folder, rank, error) for rank, error in errors.items()}
    for age, rank in enumerate(errors):
        os.utime(error_path(folder, rank), (1000 + age, 1000 + age))
    codes |= {int(name.removeprefix("rank")): -number for name, number in killed.items()}
    write_exit_codes(folder, codes)
    return first_failure(folder, 4, EXIT_FAILED)


def test_the_first_message_is_the_cause(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, {2: ValueError("one\n\ntwo"), 1: ValueError("three")})
    assert failure.message == "Rank 2 failed: ValueError: one\ntwo"
    assert isinstance(failure.error(), WorkerError)
    assert "Traceback" not in str(failure.error())
    assert "ValueError: one" in str(failure.error(debug=True)).partition("two\n")[2]


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    errors = {0: RuntimeError("Connection reset by peer"), 3: CaptureError("model.py:12: .item()")}
    failure = failure_of(tmp_path, errors)
    assert failure.message == "Rank 3 failed: model.py:12: .item()"


def test_a_signal_comes_before_messages_but_for_the_agents_own(tmp_path: Path) -> None:
    errors: dict[int, Exception] = {0: ValueError("late")}
    ended = failure_of(tmp_path, errors, rank1=signal.SIGTERM)
    assert ended.message == "Rank 0 failed: ValueError: late"
    killed = failure_of(tmp_path, errors, rank1=signal.SIGKILL)
    assert killed.message.startswith("Rank 1 was killed by signal 9 (SIGKILL). ")
    assert "memory runs out" in killed.message


def test_a_wrong_setting_names_no_rank(tmp_path: Path) -> None:
    failure = failure_of(tmp_path, {1: ConfigError("model.layers: not a number.")})
    assert failure.exit_code == EXIT_USAGE
    assert isinstance(failure.error(), ConfigError)
    assert str(failure.error()) == "model.layers: not a number."


def test_a_silent_exit_and_a_dead_agent_are_reported(tmp_path: Path) -> None:
    dead = first_failure(tmp_path, 2, -9, last_event="start of the workers")
    assert "agent of the ranks ended with exit code -9" in dead.message
    assert "last event: start of the workers" in dead.message
    write_exit_codes(tmp_path, {1: EXIT_USAGE})
    silent = first_failure(tmp_path, 2, EXIT_FAILED)
    assert (silent.exit_code, silent.is_silent) == (EXIT_USAGE, True)
    assert isinstance(silent.error(), WorkerError)

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkgraph.errors import CaptureError, ConfigError, WorkerError
from chunkgraph.jobs.launcher import Launcher
from chunkgraph.jobs.processes import first_failure, write_error

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parents[1] / "support" / "workers"

pytestmark = pytest.mark.timeout(90)


class Launched:
    """A run of two stand-in workers."""

    def __init__(self, folder: Path, has_ended: Callable[[int], bool]) -> None:
        self.folder = folder
        self.has_ended = has_ended

    def run(self, behaviour: str, *, debug: bool = False) -> None:
        command = [str(WORKERS / "stub_workers.py"), behaviour, str(self.folder)]
        Launcher(command=command, num_ranks=2, debug=debug).run()

    def workers_are_gone(self) -> bool:
        pids = [int(path.read_text()) for path in self.folder.glob("pid*")]
        assert pids, "no worker wrote its process id"
        return all(self.has_ended(pid) for pid in pids)


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: Callable[[int], bool]
) -> Launched:
    monkeypatch.setenv("PYTHONPATH", f"{WORKERS}{os.pathsep}{ROOT}")
    return Launched(tmp_path, has_ended)


def test_output_is_that_of_the_launcher(
    launched: Launched, capfd: pytest.CaptureFixture[str]
) -> None:
    launched.run("succeed")
    output = capfd.readouterr().out
    assert sorted(output.splitlines()) == ["hello from [rank 0]", "hello from [rank 1]"]
    assert launched.workers_are_gone()


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        ("fail", 1, "Rank 1 failed: model.py:12: .item()"),
        ("crash", 1, "Rank 1 failed: ZeroDivisionError: one\ntwo"),
        ("refuse", 2, "model.layer_spec: cannot import nowhere."),
        ("exit_silently", 7, "ended with exit code 7 and left no message"),
        (
            "load_a_broken_checkpoint",
            1,
            "Rank 1 failed: CheckpointException: on rank 0, RuntimeError: unexpected EOF",
        ),
        ("fail_late", 1, "Rank 1 failed: ValueError: no such corpus"),
        ("be_terminated", 1, "Rank 1 was killed by signal 15 (SIGTERM). Another program sent it"),
    ],
)
def test_a_failing_worker_is_explained_in_one_message(
    launched: Launched,
    behaviour: str,
    code: int,
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(WorkerError) as exception:
        launched.run(behaviour)
    assert message in str(exception.value)
    assert exception.value.exit_code == code
    assert ("Rank" in str(exception.value)) is (code != 2), "a setting is no rank's fault"
    assert "Traceback" not in str(exception.value)
    assert "".join(capfd.readouterr()) == ""


def test_debug_adds_the_traceback(launched: Launched) -> None:
    with pytest.raises(WorkerError, match="Traceback"):
        launched.run("crash", debug=True)


def test_a_killed_worker_is_named_with_its_signal(launched: Launched) -> None:
    with pytest.raises(WorkerError) as error:
        launched.run("be_killed")
    assert "Rank 1 was killed by signal 9 (SIGKILL). The system does this if memory" in str(
        error.value
    )
    assert launched.workers_are_gone()


@pytest.mark.skipif(sys.platform != "linux", reason="a stopped process ignores SIGTERM")
@pytest.mark.parametrize(
    ("behaviour", "start", "end"),
    [
        ("stop", "Rank 0 stopped because another", "a user stopped it: rank 1 by SIGSTOP."),
        ("stop_before_the_groups", "Rank 0 stopped because another", "rank 1 by SIGSTOP."),
        ("stop_and_be_given_up", "Rank 0 was killed by signal 6", "rank 1 by SIGSTOP."),
        ("never_answer", "Rank 0 stopped because another", "ranks that had not ended: 1."),
    ],
)
def test_a_rank_that_waits_in_vain_names_the_rank_that_it_waited_for(
    launched: Launched, behaviour: str, start: str, end: str
) -> None:
    """The launcher kills the stopped rank, which is not the failure of the job."""
    with pytest.raises(WorkerError) as error:
        launched.run(behaviour)
    message = str(error.value)
    assert message.startswith(start)
    assert message.endswith(end)
    assert launched.workers_are_gone()


def test_an_exception_on_the_way_leaves_no_worker(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_launcher: Launcher) -> None:
        deadline = time.monotonic() + 60
        while len(list(launched.folder.glob("pid*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(Launcher, "_note_failures", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launched.run("hang")
    assert launched.workers_are_gone()


def test_a_rank_that_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    write_error(tmp_path, 0, RuntimeError("Connection reset by peer"))
    write_error(tmp_path, 3, CaptureError("model.py:12: .item()"))
    error = first_failure(tmp_path, {0: 1, 3: 1})
    assert str(error) == "Rank 3 failed: model.py:12: .item()"
    killed = first_failure(tmp_path, {0: 1, 2: -6, 3: 1})
    assert str(killed).startswith("Rank 2 was killed by signal 6 (SIGABRT). ")


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs files in memory")
def test_errors_of_ranks_take_no_room_on_the_disk_of_tmpdir(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "full"))
    with pytest.raises(WorkerError, match="Rank 1 failed: ZeroDivisionError"):
        launched.run("crash")


def test_of_two_causes_the_first_counts(tmp_path: Path) -> None:
    write_error(tmp_path, 1, ConfigError("model.layers: not a number."))
    write_error(tmp_path, 2, ValueError("one\n\ntwo"))
    assert str(first_failure(tmp_path, {2: 1, 1: 2})) == "Rank 2 failed: ValueError: one\ntwo"
    wrong = first_failure(tmp_path, {1: 2, 2: 1})
    assert (str(wrong), wrong.exit_code) == ("model.layers: not a number.", 2)

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chunkgraph.errors import WorkerError
from chunkgraph.jobs.launcher import Launcher
from chunkgraph.settings import load_config, to_yaml

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parents[1] / "support" / "workers"

pytestmark = pytest.mark.timeout(90)


class Launched:
    """A run of two stand-in workers, and its output."""

    def __init__(self, run_dir: Path, has_ended: Callable[[int], bool]) -> None:
        self.run_dir = run_dir
        self.has_ended = has_ended
        self.events: list[Any] = []
        self.on_progress: Callable[[Any], None] = self.events.append
        self.output = run_dir / "output"

    def run(self, behaviour: str, **changes: Any) -> None:
        config = load_config(ROOT / "configs" / "cpu" / "gpt_pp2_vpp2_cpu.yaml")
        config_path = self.run_dir / "config.yaml"
        config_path.write_text(to_yaml(config))
        paths = str(config_path), str(self.run_dir)
        spec: dict[str, Any] = {
            "command": ["-m", "chunkgraph.jobs.worker_main", f"stub_workers:{behaviour}", *paths],
            "run_dir": self.run_dir,
            "num_ranks": 2,
            "stall_timeout_s": 60.0,
        }
        output = self.output.open("w")
        launcher = Launcher(
            **{**spec, **changes},
            on_progress=self.on_progress,
            output=output.fileno(),
        )
        with output:
            launcher.run()

    def workers_are_gone(self) -> bool:
        # A worker may be killed between creating its file and writing to it.
        texts = [path.read_text() for path in self.run_dir.glob("pid*")]
        pids = [int(text) for text in texts if text]
        assert texts, "no worker wrote its process id"
        return all(self.has_ended(pid) for pid in pids)


@pytest.fixture
def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ended: Callable[[int], bool]
) -> Launched:
    monkeypatch.setenv("PYTHONPATH", f"{WORKERS}{os.pathsep}{ROOT}")
    return Launched(tmp_path, has_ended)


def test_progress_and_output_are_passed_on(launched: Launched) -> None:
    launched.run("succeed")
    assert [event["phase"] for event in launched.events] == ["eager"] * 6 + ["chunk"] * 6
    assert sorted(launched.output.read_text().splitlines()) == [
        "hello from [rank 0]",
        "hello from [rank 1]",
    ]
    assert launched.workers_are_gone()


@pytest.mark.parametrize(
    ("behaviour", "code", "message"),
    [
        # `test_commands.py` has an error of chunkgraph.
        ("crash", 1, "Rank 1 failed: ZeroDivisionError: one\ntwo"),
        ("refuse", 2, "model.layer_spec: cannot import nowhere."),
        ("exit_silently", 7, "ended with exit code 7 and left no message"),
        ("no_such_function", 1, "no_such_function"),
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
    launched: Launched, behaviour: str, code: int, message: str
) -> None:
    with pytest.raises(WorkerError) as exception:
        launched.run(behaviour)
    assert message in str(exception.value)
    assert exception.value.exit_code == code
    assert ("Rank" in str(exception.value)) is (code != 2), "a setting is no rank's fault"
    assert "Traceback" not in str(exception.value)
    assert launched.output.read_text() == ""


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
def test_a_rank_that_waits_in_vain_names_the_rank_that_it_waited_for(launched: Launched) -> None:
    """The launcher kills the stopped rank, which is not the failure of the job."""
    with pytest.raises(WorkerError) as error:
        launched.run("stop")
    message = str(error.value)
    assert message.startswith("Rank 0 stopped because another rank ended or did not answer")
    assert message.endswith("No rank failed before it; ranks that had not ended: 1.")
    assert launched.workers_are_gone()


def test_a_silent_run_is_ended(launched: Launched) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match="reported nothing for 2 s"):
        launched.run("hang", stall_timeout_s=2.0)
    assert time.monotonic() - start < 60
    assert launched.workers_are_gone()


def test_an_exception_on_the_way_leaves_no_worker(launched: Launched) -> None:
    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    launched.on_progress = interrupt
    with pytest.raises(KeyboardInterrupt):
        launched.run("hang")
    assert launched.workers_are_gone()

"""What ends ranks that are stopped, which ignore SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chunkgraph.jobs.processes import kill_stopped_ranks

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


@pytest.fixture
def stopped() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that guards its session, and stop it."""
    program = "import os, time; from chunkgraph.jobs.processes import guard_session as guard; "
    program += "guard(); os.write(1, b'x'); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(1) == b"x"
            process.send_signal(signal.SIGSTOP)
            stat = Path(f"/proc/{process.pid}/stat")
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def test_the_guard_kills_a_stopped_rank_after_sigterm(stopped: subprocess.Popen[bytes]) -> None:
    time.sleep(2.5)  # longer than the guard sleeps
    assert stopped.poll() is None, "a debugger may stop a rank"
    stopped.terminate()
    assert stopped.wait(10) == -signal.SIGKILL


def test_under_torchrun_a_rank_kills_stopped_ones(
    stopped: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parent = os.getpid()
    monkeypatch.setattr("os.getppid", lambda: parent)  # the ranks have one parent
    kill_stopped_ranks()
    assert stopped.poll() is None, "torchrun did not start this process"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    kill_stopped_ranks()
    assert stopped.wait(10) == -signal.SIGKILL
    assert f"Killing process {stopped.pid}, a rank that is stopped" in capsys.readouterr().err

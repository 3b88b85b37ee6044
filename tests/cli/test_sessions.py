"""No process of a job outlives it, however it ends; its ranks start what Megatron's start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WITHIN_S = 10.0

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sessions are read in /proc"),
]

# As `megatron.training.async_utils.init_persistent_async_worker` does with --async-save and
# --use-persistent-ckpt-worker: a worker that waits on its queue, and the server of a Manager.
RANK = """
import multiprocessing, os, signal, subprocess, sys, time

from chunkgraph.jobs.processes import leave
from chunkgraph.launch import __main__ as launch


def work(queue):
    queue.get()


def script(_options):
    context = multiprocessing.get_context("forkserver")
    queue = context.JoinableQueue()
    context.Process(target=work, args=(queue,), daemon=True).start()
    results = multiprocessing.get_context("fork").Manager().Queue()
    results.put("there is a server")
    subprocess.Popen(["sleep", "120"])
    # One write: ranks run with -u, where print writes the line break by itself.
    os.write(1, f"pid {os.getpid()}\\n".encode())
    open(__file__ + os.environ["RANK"], "w").close()
    if os.environ["END"] == "fails" and os.environ["RANK"] == "1":
        while os.environ["LOCAL_RANK"] == "1" and not os.path.exists(__file__ + "0"):
            time.sleep(0.05)
        time.sleep(0.5)  # until the lines above have been read
        raise BaseException("no such corpus")
    time.sleep(120)


if __name__ == "__main__":
    launch.run_script = script
    launch._check_processes = lambda *_: None
    code = launch.main(object())
    if code:
        leave(code)
"""
LAUNCHER = """
import sys
from chunkgraph.jobs.launcher import Launcher
from chunkgraph.errors import ChunkGraphError

try:
    Launcher(command=[sys.argv[1]], num_ranks=2).run()
except ChunkGraphError as error:
    sys.exit(f"error: {error}")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


class Job:
    """A job whose processes are recognised by a variable of their environment."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "rank.py"
        self._script.write_text(RANK, encoding="utf-8")
        self._name = f"CHUNKGRAPH_TEST_JOB={uuid.uuid4().hex}"
        self.first: subprocess.Popen[str] | None = None

    def start(self, *command: str, end: str = "", ranks: int = 2, **environment: str) -> list[int]:
        """Start Python with ``command`` and the script of the ranks; return the ranks' pids."""
        variable, _, value = self._name.partition("=")
        self.first = subprocess.Popen(
            [sys.executable, *command, str(self._script)],
            env={**os.environ, "PYTHONPATH": str(ROOT), variable: value, "END": end, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self.first.stdout is not None
        lines: list[str] = []
        while sum(line.startswith("pid ") for line in lines) < ranks:
            line = self.first.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        return [int(line.split()[1]) for line in lines if line.startswith("pid ")]

    def processes(self) -> dict[int, str]:
        """Map the pids of living processes to their command lines."""
        command_lines = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self._name.encode() in (path / "environ").read_bytes():
                    command_lines[int(path.name)] = (
                        (path / "cmdline").read_text().replace("\0", " ")
                    )
            except OSError:
                continue
        return command_lines

    def output_until_all_ended(self) -> str:
        """Return the rest of the output; it ends when no process holds standard output any more."""
        assert self.first is not None
        start = time.monotonic()
        output, _ = self.first.communicate(timeout=WITHIN_S)
        while (left := self.processes()) and time.monotonic() - start < WITHIN_S:
            time.sleep(0.05)
        assert not left
        return output

    def kill(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        if self.first is not None:
            self.first.communicate(timeout=WITHIN_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.kill()


ALONE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "-", "MASTER_PORT": "-"}


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGKILL", "fails"])
def test_what_a_rank_started_ends_with_it(job: Job, end: str) -> None:
    (pid,) = job.start(end=end, ranks=1, **ALONE)
    assert len(job.processes()) >= 6  # the rank, its guard, sleep, server, forkserver, worker
    if end.startswith("SIG"):
        os.kill(pid, getattr(signal, end))
    output = job.output_until_all_ended()
    assert ("no such corpus" in output) == (end == "fails")


@pytest.mark.slow
@pytest.mark.parametrize("by", ["launcher", "torchrun"])
def test_no_process_is_left_when_a_rank_is_killed(job: Job, by: str) -> None:
    pytest.importorskip("torch")
    pids = job.start(*(("-c", LAUNCHER) if by == "launcher" else TORCHRUN))
    os.kill(pids[1], signal.SIGKILL)
    job.output_until_all_ended()

"""Start the ranks of a job on this machine, follow them, and say in one message why they failed.

The ranks are children of this process. Unlike torchrun's agent, it waits for the rank that explains
the failure of another one, and knows which ranks it ended itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from chunkgraph._collector import collector_paused
from chunkgraph._text import counted
from chunkgraph.errors import ConfigError
from chunkgraph.jobs.processes import (
    PARENT_PID_VARIABLE,
    REPORT_FOLDER_VARIABLE,
    first_failure,
    follows_from_another,
)

_POLL_S = 0.05
_EXPLAIN_S = 5.0
"""Time for the rank that caused the failure of another one to end."""
_SAVE_S = 30.0
"""Time for ranks to save after SIGTERM, if it ended one."""
_GRACE_S = 3.0
"""Time for a rank to end after SIGTERM."""
_RANKS_PER_CPU = 32


@dataclass(kw_only=True)
class Launcher:
    """One run of the ranks of a job."""

    command: Sequence[str]
    """Arguments of Python in each rank."""
    num_ranks: int
    """Processes to start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks, unless the user sets them."""
    debug: bool = False
    """True to show a rank's traceback in the error."""

    def __post_init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failed: dict[int, int] = {}  # exit codes by rank, in the order of the failures
        self._was_terminated = False

    def run(self) -> None:
        """Run the ranks to their end; none is left when this returns or raises.

        SIGTERM is passed on to the ranks, which may save a checkpoint and end with 0.

        Raises:
            ConfigError: There are far more ranks than CPUs.
            WorkerError: A rank failed or was killed.
            SystemExit: SIGTERM ended the ranks; the code is 143.
        """
        if self.num_ranks > (most := _RANKS_PER_CPU * (os.cpu_count() or 1)):
            raise ConfigError(
                f"{self.num_ranks} processes are too many for the CPUs of this machine: at most "
                f"{most} ({_RANKS_PER_CPU} for each CPU). Lower the number, or use more machines."
            )
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # unlike a disk, not full
        with TemporaryDirectory("", "chunkgraph-", where, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            old = signal.signal(signal.SIGTERM, self._pass_on)
            try:
                store, port = _store()
                self._start(port, folder)
                self._follow(folder)
                running = {rank: self._stop_signal(rank) for rank in self._running()}
            finally:
                self._end()
                signal.signal(signal.SIGTERM, old)
            del store  # the ranks used it until now
            if self._was_terminated and set(self._failed.values()) == {-signal.SIGTERM}:
                print("terminated: the ranks ended.", file=sys.stderr)
                raise SystemExit(128 + signal.SIGTERM)
            if self._failed:
                raise first_failure(folder, self._failed, running=running, debug=self.debug)

    def _start(self, port: int, folder: Path) -> None:
        job = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            PARENT_PID_VARIABLE: str(os.getpid()),
            REPORT_FOLDER_VARIABLE: str(folder),
        }
        for rank in range(self.num_ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                [sys.executable, "-u", *self.command],
                env={**self.environment, **os.environ, **job, **of_rank},
                stdin=subprocess.DEVNULL,
                # Only this process receives Ctrl-C; it then ends the others.
                start_new_session=True,
            )
            self._processes.append(process)
            if self._was_terminated:  # while this loop ran
                process.terminate()

    def _follow(self, folder: Path) -> None:
        """Follow the ranks until all ended, or one failed and no other will explain it."""
        failed_at = time.monotonic()
        while self._running():
            self._note_failures()
            if not self._failed:
                failed_at = time.monotonic()
            elif time.monotonic() > failed_at + self._patience_s(folder):
                return
            time.sleep(_POLL_S)
        self._note_failures()

    def _running(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.poll() is None]

    def _stop_signal(self, rank: int) -> str:
        """Return the name of the signal that has stopped a rank; empty if none has."""
        state = None
        if sys.platform == "linux":
            how = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            state = os.waitid(os.P_PID, self._processes[rank].pid, how)
        return signal.Signals(state.si_status).name if state else ""

    def _note_failures(self) -> None:
        for rank, process in enumerate(self._processes):
            if code := process.poll():
                self._failed.setdefault(rank, code)

    def _patience_s(self, folder: Path) -> float:
        """Return how long the other ranks may run on after a failure, in seconds."""
        if self._was_terminated:
            return _SAVE_S
        is_explained = not all(follows_from_another(folder, r) for r in self._failed)
        return 0.0 if is_explained else _EXPLAIN_S

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        self._was_terminated = True
        for process in self._processes:
            process.send_signal(signum)

    def _end(self) -> None:
        """End the ranks that still run and, after a failure, the processes that they started."""
        for rank in self._running():
            self._processes[rank].terminate()
        deadline = time.monotonic() + _GRACE_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if any(process.poll() != 0 for process in self._processes):
            for process in self._processes:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # a driver call cannot be interrupted
                process.wait(_GRACE_S)


def check_gpus(num_ranks: int, remedy: str) -> None:
    """Refuse more ranks than GPUs here with a ConfigError that ends with ``remedy``."""
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if num_gpus < (1 if may_share else num_ranks):
        raise ConfigError(
            f"device is cuda and the run needs {counted(num_ranks, 'GPU')}, one for each rank, but "
            f"torch sees {num_gpus} here. {remedy}"
        )


def _store() -> tuple[Any, int]:
    """Open the store where the ranks meet; return it and its port. Only this machine reaches it."""
    with collector_paused():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    listener = socket.create_server(("127.0.0.1", 0))  # port 0: the system picks a free one
    port: int = listener.getsockname()[1]
    fd = listener.detach()
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    return store, port

"""Starts the processes of a script, passes signals on, and says in one line why they failed.

No torch here, as in `chunkgraph.jobs.launcher`: the elastic agent runs in a child. Unlike there the
script's output is the terminal's own, nobody waits for progress, and SIGTERM is for the script,
which may save a checkpoint and end in its own time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from chunkgraph.errors import ConfigError, WorkerError
from chunkgraph.jobs.processes import PARENT_PID_VARIABLE, REPORT_FOLDER_VARIABLE, end_session
from chunkgraph.jobs.worker_main import EXIT_USAGE, error_path
from chunkgraph.launch.options import LaunchOptions

__all__ = ["ScriptLauncher"]

_END_GRACE_S = 15.0


class ScriptLauncher:
    """One run of a script on this machine.

    Args:
        options: what to run, checked.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._was_terminated = False

    def run(self) -> int:
        """Run the script to its end; on the way out, none of its processes is left.

        Returns:
            0, or the exit code of the process that failed first.

        Raises:
            ConfigError: flags of the script cannot go together.
            KeyboardInterrupt: Ctrl-C; the processes were ended.
        """
        with tempfile.TemporaryDirectory(
            prefix="chunkgraph-", ignore_cleanup_errors=True
        ) as folder:
            old = signal.signal(signal.SIGTERM, self._pass_on)
            try:
                return self._run(Path(folder))
            finally:
                signal.signal(signal.SIGTERM, old)

    def _run(self, folder: Path) -> int:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "chunkgraph.launch.script_agent"),
                *(str(folder), str(self._options.nproc)),
                "on" if self._options.debug else "off",
                *self._options.rank_command(),
            ],
            env={
                # One thread for each process, as torchrun does it; the user's own wins.
                "OMP_NUM_THREADS": "1",
                **({"GLOO_SOCKET_IFNAME": "lo"} if self._options.device == "cpu" else {}),
                **os.environ,
                PARENT_PID_VARIABLE: str(os.getpid()),
                REPORT_FOLDER_VARIABLE: str(folder),
            },
            stdin=subprocess.DEVNULL,
            # Ctrl-C is for this process; it ends the others in its own time.
            start_new_session=True,
        )
        try:
            code = self._process.wait()
        finally:
            self._end()
            for rank in folder.glob("pid_rank*"):
                end_session(int(rank.read_text(encoding="utf-8")))
        if code == 0:
            return 0
        return self._explain(folder, code)

    def _pass_on(self, signum: int, _frame: FrameType | None) -> None:
        self._was_terminated = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _end(self) -> None:
        """End the agent and, by it, the script's processes; they die with it in any case."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _explain(self, folder: Path, agent_code: int) -> int:
        """Say which rank failed first and why; gives the exit code."""
        failures = _failures(folder)
        if self._was_terminated and all(code == -signal.SIGTERM for code in failures.values()):
            print("terminated: the script's processes ended.", file=sys.stderr)
            return 128 + signal.SIGTERM
        for rank, code in failures.items():
            # The agent ends the other ranks by SIGTERM, which is no cause.
            if code < 0 and code != -signal.SIGTERM:
                name = signal.Signals(-code).name
                memory = (
                    " The system does that when memory runs out." if code == -signal.SIGKILL else ""
                )
                raise WorkerError(
                    f"Rank {rank} was killed by signal {-code} ({name}); the other ranks were "
                    f"ended.{memory}"
                )
        reports = [
            (path, rank)
            for rank in range(self._options.nproc)
            if (path := error_path(folder, rank)).exists()
        ]
        if not reports:
            for rank, code in failures.items():
                print(f"error: Rank {rank} ended with exit code {code}.", file=sys.stderr)
                return code if code > 0 else 1
            raise WorkerError(
                f"The agent of the script's processes ended with exit code {agent_code} before "
                "they did. Run again with --debug to see its log."
            )
        path, rank = min(reports, key=lambda report: _order(report[0]))
        message = path.read_text(encoding="utf-8").partition("\n\n")[0]
        if failures.get(rank) == EXIT_USAGE:
            raise ConfigError(message.removeprefix(f"Rank {rank}: "))
        raise WorkerError(message)


def _failures(folder: Path) -> dict[int, int]:
    path = folder / "failures.json"
    if not path.exists():
        return {}
    return {item["rank"]: item["exit_code"] for item in json.loads(path.read_text())}


def _order(path: Path) -> tuple[bool, int]:
    """What happened first stands first; what follows from another rank's failure, last."""
    text = path.read_text(encoding="utf-8").partition("\n\n")[0]
    return "another rank" in text, path.stat().st_mtime_ns

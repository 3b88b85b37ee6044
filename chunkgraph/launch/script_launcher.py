"""Start the processes of a script, forward signals, and explain in one line why they failed.

Like `chunkgraph.jobs.launcher`, this module does not import torch: the elastic agent runs in a
child. Unlike that launcher, it lets the script write to the terminal directly, follows no progress,
and forwards SIGTERM to the script, which may save a checkpoint before it ends.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from chunkgraph.jobs.exit_codes import EXIT_FAILED
from chunkgraph.jobs.failures import first_failure, read_exit_codes
from chunkgraph.jobs.launcher import start_agent
from chunkgraph.jobs.processes import REPORT_FOLDER_VARIABLE, end_session
from chunkgraph.launch.options import LaunchOptions

__all__ = ["ScriptLauncher"]

_END_GRACE_S = 15.0


class ScriptLauncher:
    """One run of a script on this machine.

    Args:
        options: The checked launch options.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._was_terminated = False

    def run(self) -> int:
        """Run the script to its end; none of its processes outlives this call.

        Returns:
            0, or the exit code of the process that failed first.

        Raises:
            ConfigError: Flags of the script cannot be combined.
            KeyboardInterrupt: Ctrl-C was pressed; the processes have ended.
        """
        with tempfile.TemporaryDirectory(
            prefix="chunkgraph-", ignore_cleanup_errors=True
        ) as folder:
            old = signal.signal(signal.SIGTERM, self._forward_signal)
            try:
                return self._run(Path(folder))
            finally:
                signal.signal(signal.SIGTERM, old)

    def _run(self, folder: Path) -> int:
        defaults = {"OMP_NUM_THREADS": "1"}  # one thread for each process, as with torchrun
        if self._options.device == "cpu":
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        self._process = start_agent(
            "chunkgraph.launch.script_agent",
            folder,
            self._options.nproc,
            self._options.rank_command(),
            defaults=defaults,
            variables={REPORT_FOLDER_VARIABLE: str(folder)},
            debug=self._options.debug,
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

    def _forward_signal(self, signum: int, _frame: FrameType | None) -> None:
        self._was_terminated = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signum)

    def _end(self) -> None:
        """End the agent and, through it, the script's processes, which also die with it."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _explain(self, folder: Path, agent_exit_code: int) -> int:
        """Explain which rank failed first and why; return the exit code."""
        exit_codes = read_exit_codes(folder)
        if self._was_terminated and all(code == -signal.SIGTERM for code in exit_codes.values()):
            print("terminated: the script's processes ended.", file=sys.stderr)
            return 128 + signal.SIGTERM
        failure = first_failure(folder, self._options.nproc, agent_exit_code)
        if not failure.is_silent:
            raise failure.error()
        print(f"error: {failure.message}", file=sys.stderr)
        return max(failure.exit_code, EXIT_FAILED)

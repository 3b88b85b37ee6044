"""The process between ``chunkgraph launch`` and its ranks.

Usage: ``python -m ... FOLDER NUM LOGS COMMAND...``. torchrun's elastic agent runs in a separate
thread, where it installs no signal handlers. SIGTERM is forwarded to the ranks, which may save a
checkpoint and exit cleanly; SIGINT ends them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from chunkgraph.jobs.agent import prepare_agent, run_elastic
from chunkgraph.jobs.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED

__all__ = ["main"]

_POLL_S = 0.1
_GRACE_S = 3.0


class _Signals:
    """Forwards signals to the ranks, each of which writes its pid into the folder at its start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._was_terminated = False
        self._notified: set[Path] = set()
        self.ends_at: float | None = None
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._end)

    def send(self, signum: int) -> None:
        for path in self._folder.glob("pid_rank*"):
            self._send_to(path, signum)

    def notify_late_ranks(self) -> None:
        """Forward SIGTERM to ranks that started after it arrived."""
        if self._was_terminated:
            for path in set(self._folder.glob("pid_rank*")) - self._notified:
                self._notified.add(path)
                self._send_to(path, signal.SIGTERM)

    def _send_to(self, path: Path, signum: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signum)

    def _terminate(self, signum: int, _frame: FrameType | None) -> None:
        self._was_terminated = True
        self._notified.update(self._folder.glob("pid_rank*"))
        self.send(signum)

    def _end(self, _signum: int, _frame: FrameType | None) -> None:
        self.ends_at = time.monotonic() + _GRACE_S
        self.send(signal.SIGTERM)


def main(folder: str, num_workers: str, logs: str, *command: str) -> int:
    """Start the ranks and wait for them; return 0 if all succeeded."""
    prepare_agent(logs)
    signals = _Signals(Path(folder))
    codes: list[int] = []

    def run() -> None:
        codes.append(run_elastic(Path(folder), int(num_workers), *command))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        signals.notify_late_ranks()
        if signals.ends_at is not None and time.monotonic() > signals.ends_at:
            signals.send(signal.SIGKILL)
            return EXIT_INTERRUPTED
    return codes[0] if codes else EXIT_FAILED


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the agent's thread

"""Starts the training processes, follows them, and says in one message why they failed.

No torch here: the elastic agent runs in a child (``launch_agent``), so that Ctrl-C, a stalled run
and a dead agent are handled by a process that is never inside a collective itself.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkgraph.errors import ChunkGraphError, ConfigError, WorkerError
from chunkgraph.jobs.processes import PARENT_PID_VARIABLE, stop
from chunkgraph.jobs.worker_main import EXIT_USAGE, error_path

__all__ = ["LaunchSpec", "Launcher"]

_POLL_INTERVAL_S = 0.1
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What to start."""

    target: str
    """``package.module:function``, called as ``function(config_path, run_dir) -> int``."""
    config_path: Path
    """The resolved configuration."""
    run_dir: Path
    """Folder of the run, for progress, results and errors."""
    num_workers: int
    """Processes to start, one for each rank."""
    stall_timeout_s: float
    """Longest silence of rank 0, in seconds, before the run is ended."""
    time_limit_s: float | None = None
    """Longest time of the whole run, in seconds; None for no limit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the workers where the user has not set them."""
    debug: bool = False
    """Whether errors carry the workers' tracebacks, and the agent logs."""


class Launcher:
    """One run of the training processes.

    Args:
        spec: What to start.
        on_progress: Called with each progress line of rank 0, from the calling thread.
        on_output: Called with each line the workers print, from another thread.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        *,
        on_progress: Callable[[Mapping[str, Any]], None],
        on_output: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._on_progress = on_progress
        self._on_output = on_output
        self._last = "the processes were being started"

    def run(self) -> None:
        """Start the workers, follow them to the end; on the way out, none is left.

        Raises:
            WorkerError: A worker failed, was killed, or reported nothing for too long.
            ConfigError: A worker found the configuration wrong.
        """
        spec = self._spec
        process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "chunkgraph.jobs.agent"),
                *(str(spec.run_dir), str(spec.config_path), str(spec.num_workers), spec.target),
                "on" if spec.debug else "off",
            ],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # Ctrl-C is for this process; it ends the others in its own time.
            start_new_session=True,
        )
        reader = threading.Thread(target=self._forward_output, args=(process,), daemon=True)
        reader.start()
        try:
            self._follow(process)
        finally:
            stop(process)
            reader.join(timeout=2.0)
            if process.stdout is not None and not reader.is_alive():
                process.stdout.close()
        if process.returncode != 0:
            raise self._failure(process.returncode)

    def _environment(self) -> dict[str, str]:
        environment = {**self._spec.environment, **os.environ}
        environment[PARENT_PID_VARIABLE] = str(os.getpid())
        return environment

    def _forward_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_output(line.rstrip("\n"))

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Pass progress on until the agent ends or rank 0 is silent for too long."""
        lines = _tail(self._spec.run_dir / "progress.jsonl")
        allowed_s = max(self._spec.stall_timeout_s, _START_TIMEOUT_S)
        deadline = time.monotonic() + allowed_s
        limit_s = self._spec.time_limit_s
        end = time.monotonic() + limit_s if limit_s is not None else math.inf
        while True:
            has_ended = process.poll() is not None
            for line in next(lines):
                event = json.loads(line)
                allowed_s = self._spec.stall_timeout_s
                deadline = time.monotonic() + allowed_s
                self._last = _describe(event)
                if event.get("event") != "started":
                    self._on_progress(event)
            if has_ended:
                return
            if time.monotonic() > end:
                msg = f"The run was ended after its limit of {limit_s:g} s; last, {self._last}."
                raise WorkerError(msg)
            if time.monotonic() > deadline:
                msg = (
                    f"The workers reported nothing for {allowed_s:g} s and were ended; last, "
                    f"{self._last}. If steps of this model take so long, raise run.timeout_s; "
                    "otherwise a rank hangs: run again with --debug."
                )
                raise WorkerError(msg)
            time.sleep(_POLL_INTERVAL_S)

    def _failure(self, agent_exit_code: int) -> ChunkGraphError:
        """The failure that came first, not those it caused on other ranks."""
        exit_codes = _exit_codes(self._spec.run_dir)
        for rank, code in exit_codes.items():
            # The agent ends the other ranks by SIGTERM, which is no cause.
            if code < 0 and code != -signal.SIGTERM:
                return WorkerError(
                    f"Rank {rank} was killed by signal {-code} ({_signal_name(-code)}); last, "
                    f"{self._last}. The other ranks were ended. {_signal_advice(-code)}"
                )
        paths = {
            rank: error_path(self._spec.run_dir, rank) for rank in range(self._spec.num_workers)
        }
        reports = {rank: path for rank, path in paths.items() if path.exists()}
        if reports:
            rank, path = min(reports.items(), key=lambda report: report[1].stat().st_mtime_ns)
            message, _, details = path.read_text(encoding="utf-8").partition("\n\n")
            if not message.lower().startswith("rank"):
                message = f"Rank {rank} failed: {message}"
            if self._spec.debug:
                message = f"{message}\n{details}"
            is_usage = exit_codes.get(rank) == EXIT_USAGE
            return ConfigError(message) if is_usage else WorkerError(message)
        for rank, code in exit_codes.items():
            return WorkerError(
                f"Rank {rank} ended with exit code {code} and left no message; see its output."
            )
        return WorkerError(
            f"The workers' agent ended with exit code {agent_exit_code} before they did; last, "
            f"{self._last}. Run again with --debug to see its log."
        )


def _tail(path: Path) -> Iterator[list[str]]:
    """For each ``next``, the whole lines that were appended to a file since the last one."""
    offset = 0
    while True:
        lines: list[str] = []
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            offset += len(whole)
            lines = whole.decode("utf-8").splitlines()
        yield lines


def _exit_codes(run_dir: Path) -> dict[int, int]:
    """Exit codes of the ranks that failed, as the agent left them; signals are negative."""
    path = run_dir / "failures.json"
    if not path.exists():
        return {}
    return {item["rank"]: item["exit_code"] for item in json.loads(path.read_text())}


def _describe(event: Mapping[str, Any]) -> str:
    if "step" in event and "phase" in event:
        what = "captured before" if event.get("event") == "capture" else "finished"
        return f"they {what} step {event['step'] + 1} of the {event['phase']} run"
    return "they were starting up"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _signal_advice(number: int) -> str:
    if number == signal.SIGKILL:
        return (
            "The system does that when memory runs out: try a smaller model, sequence or "
            "micro_batch_size."
        )
    return "Run again with --debug for more."

"""Start the ranks of a job, follow them, and explain in one message why they failed.

No torch here: the elastic agent runs in a child (``jobs.agent``), so that a process outside of all
collectives handles Ctrl-C, a stalled run and a dead agent.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkgraph.errors import WorkerError
from chunkgraph.jobs.failures import first_failure
from chunkgraph.jobs.processes import PARENT_PID_VARIABLE, stop

__all__ = ["LaunchSpec", "Launcher", "start_agent"]

_POLL_INTERVAL_S = 0.1
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A job to start."""

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
    """Variables for the workers, unless the user sets them."""
    debug: bool = False
    """True to show the workers' tracebacks in errors, and to let the agent log."""


def start_agent(
    module: str,
    folder: Path,
    num_ranks: int,
    command: Sequence[str],
    *,
    defaults: Mapping[str, str],
    debug: bool,
    variables: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.Popen[str]:
    """Start the process that runs the ranks of a job.

    Args:
        module: The agent's module, run as ``python -m module FOLDER NUM_RANKS LOGS COMMAND...``.
        folder: The run folder, for reports of failures.
        num_ranks: Number of ranks to start.
        command: Arguments of Python in each rank.
        defaults: Environment variables, unless the user sets them.
        debug: Whether the agent logs.
        variables: Environment variables that replace the user's.
        stdout: The output of all processes, as for `subprocess.Popen`.
    """
    logs = "on" if debug else "off"
    return subprocess.Popen(
        [sys.executable, "-u", "-m", module, str(folder), str(num_ranks), logs, *command],
        env={
            **defaults,
            **os.environ,
            **(variables or {}),
            PARENT_PID_VARIABLE: str(os.getpid()),
        },
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT if stdout is not None else None,
        text=True,
        errors="replace",
        # Only this process receives Ctrl-C; it then ends the others.
        start_new_session=True,
    )


class Launcher:
    """One run of the training processes.

    Args:
        spec: The job.
        on_progress: Callback with each progress line of rank 0, in the calling thread.
        on_output: Callback with each line that the workers print, in another thread.
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
        self._last_event = "start of the processes"

    def run(self) -> None:
        """Start the workers and follow them to the end; none is left running.

        Raises:
            WorkerError: A worker failed, was killed, or reported nothing for too long.
            ConfigError: A worker reported a wrong configuration.
        """
        spec = self._spec
        paths = (str(spec.config_path), str(spec.run_dir))
        process = start_agent(
            "chunkgraph.jobs.agent",
            spec.run_dir,
            spec.num_workers,
            ("-m", "chunkgraph.jobs.worker_main", spec.target, *paths),
            defaults=spec.environment,
            debug=spec.debug,
            stdout=subprocess.PIPE,
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
            failure = first_failure(
                spec.run_dir, spec.num_workers, process.returncode, last_event=self._last_event
            )
            raise failure.error(debug=spec.debug)

    def _forward_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._on_output(line.rstrip("\n"))

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Forward progress until the agent ends or rank 0 is silent for too long."""
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
                self._last_event = _describe(event)
                if event.get("event") != "started":
                    self._on_progress(event)
            if has_ended:
                return
            if time.monotonic() > end:
                msg = (
                    f"The run was ended after its limit of {limit_s:g} s; last event: "
                    f"{self._last_event}."
                )
                raise WorkerError(msg)
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"The workers reported nothing for {allowed_s:g} s and were ended; last event: "
                    f"{self._last_event}. If steps of this model take so long, raise "
                    "run.timeout_s; otherwise a rank hangs: run again with --debug."
                )
            time.sleep(_POLL_INTERVAL_S)


def _tail(path: Path) -> Iterator[list[str]]:
    """Yield, for each ``next``, the whole lines appended to a file since the last one."""
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


def _describe(event: Mapping[str, Any]) -> str:
    if "step" in event and "phase" in event:
        step = f"step {event['step'] + 1} of the {event['phase']} run"
        return f"capture before {step}" if event.get("event") == "capture" else f"end of {step}"
    return "start of the workers"

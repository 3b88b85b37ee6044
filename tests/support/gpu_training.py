"""Trains on GPUs with the command, and with ``python -m chunkgraph.launch`` under torchrun."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import finished

ROOT = Path(__file__).parents[2]


def train_on_gpus(
    folder: Path,
    name: str,
    arguments: Sequence[str | Path],
    num_processes: int = 2,
    **variables: str,
) -> tuple[list[str], str]:
    """Train to the end.

    Args:
        folder: Where files are written.
        name: Of the log.
        arguments: Of the launcher: the script and its flags.
        num_processes: Ranks, one for each GPU.
        **variables: Environment variables.

    Returns:
        The exact log of the last rank, and the output.
    """
    done = finished(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_processes), "-m", "chunkgraph.launch", *arguments),
            *("--exact-log", folder / name, "--data-cache-path", folder / "cache"),
        ],
        {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTHONWARNINGS": "ignore",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
            **variables,
        },
        timeout_s=170.0,
        cwd=folder,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-12000:]
    log = folder / f"{name}.rank{num_processes - 1}"
    return log.read_text(encoding="utf-8").splitlines(), output


def check_replays(output: str) -> None:
    """Check that all steps but the first replayed graphs."""
    replays = [int(n) for n in re.findall(r"graph replays: +(\d+)", output)]
    assert replays[0] == 0
    assert all(n > 0 for n in replays[1:]), replays


def check_rounding(results: dict[str, Any]) -> None:
    """Check that steps equal eager ones up to rounding, and all but the first replay."""
    for step in results["steps"]:
        assert step["loss"] == pytest.approx(step["eager"]["loss"], rel=1e-3)
        assert step["grad_norm"] == pytest.approx(step["eager"]["grad_norm"], rel=2e-2)
    assert all(step["replays"] for step in results["steps"][1:])


def trained_report(
    arguments: Sequence[str | Path],
    report: Path,
    *,
    is_equal: bool = False,
    timeout_s: float = 280.0,
) -> dict[str, Any]:
    """Train by ``chunkgraph train``; return its report.

    Unless the run must be equal to eager (``is_equal``), also if it found unequal values.
    """
    command = [sys.executable, "-m", "chunkgraph.cli", "train", *arguments, "--json", report]
    done = finished(command, timeout_s=timeout_s)
    is_done = done.returncode == 0 if is_equal else report.exists()
    assert is_done, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    results: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return results

"""GPU workers that die or fail in a step: the command reports it and leaves no process."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gpu" / "gpt_pp2_gpu.yaml"
SMALL = ["model.num_layers=4", "model.hidden_size=512", "model.ffn_hidden_size=1024"]


def _workers(of: int) -> list[int]:
    """Return the descendants of a process that run the worker module."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                commands[int(folder.name)] = (folder / "cmdline").read_text()
                parents[int(folder.name)] = int(stat[1])
            except (OSError, IndexError):
                continue

    def descends(pid: int) -> bool:
        while pid in parents and pid != of:
            pid = parents[pid]
        return pid == of

    # Each worker has a guard, a child with the same command.
    agents = {p for p, c in commands.items() if "-m\0chunkgraph.jobs.agent" in c and descends(p)}
    return sorted(p for p in commands if parents.get(p) in agents)


@pytest.mark.megatron
@pytest.mark.multigpu
@pytest.mark.timeout(200)
def test_a_killed_worker_ends_the_run() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    counts = [4] * 15000
    command = subprocess.Popen(
        [
            *(sys.executable, "-m", "chunkgraph.cli", "train", CONFIG, *SMALL),
            *(f"train.num_microbatches={counts}", "train.compare=none"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert command.stdout is not None
        for line in command.stdout:
            if "step 30/" in line:
                break
        workers = _workers(command.pid)
        assert len(workers) == 2
        os.kill(workers[-1], signal.SIGKILL)
        output, _ = command.communicate(timeout=60)
        assert command.returncode == 1
        assert "was killed by signal 9" in output
        time.sleep(1)
        assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    finally:
        command.kill()
        command.wait()


@pytest.mark.megatron
@pytest.mark.multigpu
@pytest.mark.timeout(200)
@pytest.mark.parametrize("schedule", ["auto", "zb-h1"])
def test_an_error_on_one_rank_ends_the_run(schedule: str) -> None:
    support = Path(__file__).resolve().parents[1] / "support"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "chunkgraph.cli", "train", CONFIG, *SMALL),
            *("model.layer_spec=user_specs:fails_on_last_rank", "train.compare=none"),
            *("train.num_microbatches=[4, 4]", f"pipeline.schedule={schedule}"),
        ],
        env={**os.environ, "PYTHONPATH": f"{support}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1
    assert "fails on purpose" in done.stdout + done.stderr

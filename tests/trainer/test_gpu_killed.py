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
    """Return the children of a process."""
    return sorted(map(int, Path(f"/proc/{of}/task/{of}/children").read_text().split()))


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

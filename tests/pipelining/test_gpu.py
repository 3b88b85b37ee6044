"""Every schedule class that splits a rank's layers or backwards, on GPUs: equal to eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCHEDULES = ("1f1b", "interleaved", "interleaved-zb", "zb-v", "dualpipe-v")


@pytest.mark.multigpu
@pytest.mark.timeout(240)
def test_twelve_blocks_under_every_schedule(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """One job for all cases: bfloat16, deterministic kernels, poisoned scratch."""
    path = tmp_path / "result.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), ROOT / "benchmarks" / "torch_pipelines.py"),
            *("--num-layers", "12", "--hidden-size", "512", "--ffn-hidden-size", "2048"),
            *("--num-heads", "8", "--seq-length", "256", "--num-steps", "5", "--rounds", "1"),
            *("--num-microbatches", "8", "--verify", "poison", "--json", path),
            *("--schedules", *SCHEDULES),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        },
        capture_output=True,
        text=True,
        timeout=210,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert {row["schedule"]: row["equal"] for row in document["schedules"]} == dict.fromkeys(
        SCHEDULES, True
    )
    assert document["costs_ms"].keys() == set("FBIW")

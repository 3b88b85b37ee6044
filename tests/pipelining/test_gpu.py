"""Every schedule class that splits a rank's layers or backwards, on GPUs: equal to eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chunkgraph.bench.document import VariantResult

ROOT = Path(__file__).parents[2]
SCHEDULES = ("interleaved", "interleaved-zb", "zb-v", "dualpipe-v")


@pytest.mark.multigpu
@pytest.mark.timeout(240)
def test_twelve_blocks_under_every_schedule(tmp_path: Path, free_port: Callable[[], int]) -> None:
    """One job for all cases: bfloat16, deterministic kernels, poisoned scratch.

    One capture serves all numbers of microbatches, with evaluations in between.
    """
    path = tmp_path / "result.json"
    config = ROOT / "configs" / "bench" / "torch_pp2.yaml"
    settings = (
        *("model.num_layers=12", "model.hidden_size=512", "model.ffn_hidden_size=2048"),
        *("model.num_attention_heads=8", "model.seq_length=256", "bench.num_steps=5"),
        *("train.num_microbatches=[4,8,6,4]", "capture.verify=poison", "run.timeout_s=60"),
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-port", str(free_port()), ROOT / "tests" / "support" / "torch_bench.py"),
            *(config, path, ",".join(SCHEDULES), *settings),
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
    summaries = json.loads(path.read_text())
    assert len(summaries) == 2 * (1 + len(SCHEDULES))
    eager = VariantResult("eager", None, summaries["eager"])
    for name, summary in summaries.items():
        assert VariantResult(name, None, summary).first_difference(eager) is None, name
        if summary["eval_losses"]:
            assert summary["eval_losses"] == eager.values["eval_losses"], name
        if name.startswith("chunk"):
            assert summary["replayed_steps"] == 7, name
            assert summary["capture_sessions"] == 1, name

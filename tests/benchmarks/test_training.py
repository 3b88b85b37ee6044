"""`benchmarks/training.py` measures variants in turns, and says where they differ."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import python

from chunkgraph.data import read_documents
from chunkgraph.settings import load_config

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "training.py"
CONFIG = str(ROOT / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
COUNTS, SEQS, TOKENS, WARMUP, STEPS = (3, 5, 8, 12), 7, 48, 3, 6
SETTINGS = (
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=32"),
    *("model.num_attention_heads=2", "model.layer_spec=user_specs:packed", "device=cpu"),
    *("pipeline.pipeline_model_parallel_size=1", "train.num_microbatches=[2,3]"),
    *("train.micro_batch_size=1", "train.seed=8"),
    *(f"packing.max_packed_seqs={SEQS}", f"packing.max_packed_tokens={TOKENS}"),
    "capture.scope=chunk",
)


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return loaded(SCRIPT)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    search = os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "support"]))
    return python(SCRIPT, CONFIG, *arguments, timeout_s=280, PYTHONPATH=search)


# Not for each release of Megatron: tests of packed training cover their differences.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_packed_steps_are_measured_and_equal(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    variants = "eager,chunk,local"
    sizes = ("--rounds", "1", "--num-steps", str(STEPS), "--num-warmup-steps", str(WARMUP))
    counts = ("--document-counts", *map(str, COUNTS))
    done = run(*SETTINGS, "--variants", variants, *sizes, *counts, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    eager, chunk, local = json.loads(path.read_text())["variants"]
    documents = loaded(SCRIPT.with_name("drawn_documents.py"))
    text = read_documents()
    drawn = documents.DrawnDocuments(text, counts=COUNTS, num_tokens=TOKENS, seed=8)
    steps = [
        [drawn.row(step, m, 0).lengths for m in range(2 + step % 2)]
        for step in range(WARMUP, WARMUP + STEPS)
    ]
    misfits = [any(len(lengths) >= SEQS for lengths in step) for step in steps]
    assert 0 < sum(misfits) < STEPS
    assert chunk["rounds"][0]["is_fallback"] == misfits
    assert chunk["fallback_share"] == pytest.approx(sum(misfits) / STEPS)
    assert eager["fallback_share"] == 0
    for variant in (eager, chunk):
        assert variant["error"] is variant["difference_to_eager"] is None
        (measured,) = variant["rounds"]
        assert len(measured["step_ms"]) == STEPS
        assert len(measured["losses"]) == WARMUP + STEPS  # warmup is compared too
        assert measured["num_tokens"] == [sum(map(sum, step)) for step in steps]
        assert variant["step_ms_p10"] <= variant["step_ms"] <= variant["step_ms_p90"]
        assert variant["host_schedule_ms"] > 0
        assert 0 < variant["host_forward_us"] < 1e3 * variant["host_schedule_ms"]
    assert chunk["rounds"][0]["num_captures"] == 0
    assert "needs a GPU" in local["error"]
    assert "local failed: captures CUDA graphs" in done.stdout
    assert "| chunk " in done.stdout


def test_numbers_of_drawn_documents_follow_the_distribution() -> None:
    documents = loaded(SCRIPT.with_name("drawn_documents.py"))
    drawn = documents.DrawnDocuments(read_documents(), counts=COUNTS, num_tokens=TOKENS, seed=8)
    numbers = sorted(len(drawn.row(0, microbatch, 0).lengths) for microbatch in range(400))
    assert numbers[-1] <= COUNTS[-1]
    for share, count in zip((0.5, 0.9), COUNTS, strict=False):
        assert abs(sum(n <= count for n in numbers) / len(numbers) - share) < 0.08


def test_differences_fail_the_command(training: ModuleType) -> None:
    def variant(name: str, losses: list[float], **changes: Any) -> Any:
        measured = {
            "losses": [loss.hex() for loss in losses],
            "grad_norms": [(1.0).hex()] * len(losses),
            "parameters_sha256": ["a"],
            "num_captures": 0,
            "is_deterministic": True,
        }
        return training.Variant(name, [], load_config(CONFIG), [{**measured, **changes}])

    eager = variant("eager", [3.0, 2.0])
    assert training._failures([eager, variant("chunk", [3.0, 2.0])]) == []
    other = variant("chunk+pipeline.schedule=zb-h1", [3.0, 2.5])
    (failure,) = training._failures([eager, other])
    assert failure.endswith("differs from eager: loss of step 2: 2.5 and 2.0")
    # Another model has other sums, and Megatron's graphs are not this project's.
    others = ("chunk+moe.moe_expert_capacity_factor=1.0", "local")
    assert training._failures([eager, *(variant(name, [9.0, 9.0]) for name in others)]) == []
    assert training._failures([eager, variant("chunk", [9.0, 9.0], is_deterministic=False)]) == []
    (failure,) = training._failures([variant("chunk", [3.0], num_captures=2)])
    assert "2 captures in measured steps" in failure

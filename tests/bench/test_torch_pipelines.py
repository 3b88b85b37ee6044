"""Torch pipelines in a bench: which variants there are, what they measure, and that all agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch_release import HAS_LOCAL_STAGES

from chunkgraph.bench.choice import chosen_variants, run_as, torch_schedule
from chunkgraph.bench.document import BenchDocument, VariantResult
from chunkgraph.bench.report import find_failures
from chunkgraph.errors import ConfigError
from chunkgraph.settings import Config, load_config

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "bench" / "torch_pp2.yaml"
TINY = (
    *("device=cpu", "model.num_layers=4", "model.hidden_size=32", "model.ffn_hidden_size=64"),
    *("model.num_attention_heads=2", "model.seq_length=16", "model.params_dtype=float32"),
    "bench.num_steps=2",
)
SCHEDULES = ("interleaved", *(("zb-v", "dualpipe-v") if HAS_LOCAL_STAGES else ()))


def _config(*overrides: str) -> Config:
    return load_config(CONFIG, [*TINY, *overrides])


def test_each_schedule_is_an_eager_variant_and_one_with_graphs() -> None:
    config = _config("bench.schedules=[zb-h1,zb-v]")
    names = chosen_variants(None, config)
    assert names == ("eager", "chunk", "eager_zb-h1", "chunk_zb-h1", "eager_zb-v", "chunk_zb-v")
    assert [run_as(name) for name in names] == ["eager", "chunk"] * 3
    assert [torch_schedule(name).name for name in names[1::2]] == ["1f1b", "zb-h1", "zb-v"]
    assert chosen_variants("chunk_dualpipe-v", config) == ("chunk_dualpipe-v",)


@pytest.mark.parametrize(
    ("variants", "overrides", "message"),
    [
        ("local", (), "unknown variant 'local'; choose from eager, chunk, "),
        ("chunk", ("model.swiglu=true",), "model.swiglu has no effect with bench.runtime=torch"),
        ("chunk", ("capture.scope=block",), "capture.scope has no effect"),
        ("chunk", ("moe.num_moe_experts=4",), "moe.num_moe_experts has no effect"),
        ("chunk", ("model.layer_spec=a.b:c",), "a.b:c, a layer of Megatron's"),
        ("chunk_zb-v", ("model.num_layers=6",), "zb-v has 2 stages .* make it a multiple of 4"),
        ("chunk_dualpipe-v", ("train.num_microbatches=[3]",), "nearest legal: 4"),
    ],
)
def test_what_cannot_run_is_refused(
    variants: str, overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_variants(variants, _config(*overrides))


@pytest.mark.timeout(150)
@pytest.mark.slow
def test_all_schedules_give_the_same_bits(
    tmp_path: Path, run_script: Callable[..., tuple[list[int], str]]
) -> None:
    path = tmp_path / "config.json"
    settings = [*TINY, "train.num_microbatches=[4,8]", "run.timeout_s=60"]
    program = ROOT / "tests" / "support" / "torch_bench.py"
    codes, output = run_script(program, str(CONFIG), str(path), ",".join(SCHEDULES), *settings)
    assert codes == [0, 0], output
    summaries: dict[str, dict[str, Any]] = json.loads(path.read_text())
    eager = VariantResult("eager", None, summaries["eager"])
    for name, summary in summaries.items():
        assert VariantResult(name, None, summary).first_difference(eager) is None, name
        assert summary["num_microbatches"] == [8, 4]  # after three warmup steps
        assert summary["num_captures_after_first"] == summary["num_measured_captures"] == 0
        evaluations = summary["eval_losses"]
        if "-v" in name:
            assert evaluations == []  # an error of torch
        else:
            assert len(evaluations) == 4 + 8 + 4 + 8 + 4
            assert evaluations == eager.values["eval_losses"]
        is_split = torch_schedule(name).splits_backward
        if run_as(name) == "eager":
            assert summary["costs_ms"] is summary["num_gemms"] is summary["capture_s"] is None
        else:
            # Four linear layers in each of two: none is computed twice, or left out.
            gemms = {"F": 8, "I": 8, "W": 8} if is_split else {"F": 8, "B": 16}
            assert summary["num_gemms"] == gemms
            assert summary["costs_ms"].keys() == gemms.keys()
            assert summary["capture_s"] > 0
    # The comparison can fail: another seed has other losses and parameters.
    other = {**summaries["eager"], "losses_hex": summaries["eager"]["losses_hex"][::-1]}
    assert "loss of step 1" in str(VariantResult("x", None, other).first_difference(eager))


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def test_measured_and_simulated_steps_are_printed_side_by_side(device: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "chunkgraph.cli", "bench", CONFIG, *TINY, f"device={device}"]
    done = subprocess.run(
        [*command, "train.num_microbatches=[4]", "--variants", "chunk,chunk_zb-h1", "--json", path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    document = json.loads(path.read_text())
    assert document["costs_ms"].keys() == set("FBIW")
    simulated = document["simulated_step_ms"]["zb-h1"]
    assert simulated.keys() == {"2", "4", "8"}
    measured = {variant["name"]: variant["step_ms"] for variant in document["variants"]}
    _, table = done.stdout.split("simulated with ")
    assert "at P = 2" in table
    (row,) = (line.split() for line in table.splitlines() if line.startswith("zb-h1 "))
    assert row[1] == f"{simulated['2']:.1f}"
    assert row[-1] == f"{measured['chunk_zb-h1']:.1f}"
    (other,) = (line.split() for line in table.splitlines() if line.startswith("zb-v "))
    assert other[-1] == "-"  # not in the run
    plan = [sys.executable, "-m", "chunkgraph.cli", "plan", "--pp", "2", "--costs", path]
    planned = subprocess.run(plan, capture_output=True, text=True, timeout=60, check=False)
    assert planned.returncode == 0, planned.stderr


@pytest.mark.parametrize(
    ("num_gemms", "failures"), [(8, []), (9, ["a backward has 16 GEMMs, but its halves 8 + 9"])]
)
def test_gemms_that_run_twice_fail_the_command(num_gemms: int, failures: list[str]) -> None:
    document = BenchDocument.start(_config(), command="", commit="c")
    equal = {"losses_hex": [], "grad_norms_hex": [], "parameters_sha256": []}
    for name, gemms in (
        ("eager", None),
        ("chunk", {"F": 8, "B": 16}),
        ("chunk_zb-h1", {"F": 8, "I": 8, "W": num_gemms}),
    ):
        document.add(VariantResult(name, None, {**equal, "num_gemms": gemms}))
    assert find_failures(document, ["eager", "chunk", "chunk_zb-h1"]) == failures


def test_profiles_are_megatrons(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "chunkgraph.cli", "bench", str(CONFIG), *TINY, "--profile"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--profile profiles the steps of bench.runtime=megatron only" in done.stderr

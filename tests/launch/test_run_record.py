"""The record and the reports of a run, without Megatron's training program."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from chunkgraph.engine import CaptureReport
from chunkgraph.engine.counters import Counters
from chunkgraph.errors import ConfigError
from chunkgraph.launch.flags import GraphFlags
from chunkgraph.launch.hooks import _is_profiled
from chunkgraph.launch.run_record import capture_line, save_run_record, start_line
from chunkgraph.launch.step_metrics import StepMetrics
from chunkgraph.megatron.features.packing.banks import PackedBanks
from chunkgraph.megatron.scope_choice import ChosenScope
from chunkgraph.packing import ContextLimits, PackedShape
from chunkgraph.settings import CaptureConfig, PackingConfig, load_config
from chunkgraph.trainer.trained_model import capture_options

pytestmark = [pytest.mark.megatron, pytest.mark.every_release]


def _graphs(**changes: Any) -> Any:
    values = {"num_slots": (4, 2), "num_banks": 1, "packed_shapes": (), "context_banks": ()}
    values |= {"scope": ChosenScope("chunk")}
    values["site"] = SimpleNamespace(packing=None)
    return SimpleNamespace(**{**values, **changes})


def _arguments(**changes: Any) -> argparse.Namespace:
    values = {"save": None, "num_layers": 4, "pipeline_model_parallel_size": 2, "fp8": None}
    return argparse.Namespace(**{**values, **changes})


def test_the_settings_are_saved_whole(tmp_path: Path) -> None:
    args = _arguments(save=str(tmp_path / "run"), recompute_modules=["core_attn"], bf16=True)
    path = save_run_record(
        _graphs(), GraphFlags(capture=CaptureConfig(num_warmup_steps=2)), args, None
    )
    assert path == tmp_path / "run" / "chunkgraph.yaml"
    record = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert record["model"]["num_layers"] == 4
    assert record["model"]["recompute_modules"] == ["core_attn"]
    assert record["model"]["bf16"] is True
    assert record["pipeline"]["pipeline_model_parallel_size"] == 2
    assert record["capture"]["scope"] == "chunk"
    assert record["capture"]["num_warmup_steps"] == 2
    assert record["graphs_of_rank_0"] == {"slots_per_chunk": [4, 2], "num_graphs": 12}
    assert "moe_router_topk" not in record["model"]
    other = save_run_record(_graphs(), GraphFlags(), args, tmp_path / "other")
    assert other == tmp_path / "other" / "chunkgraph.yaml"  # --run-dir takes precedence


def test_memsets_that_stay_are_reported() -> None:
    numbers = {"num_graphs": 8, "slot_bytes": 1, "held_bytes": 1, "scratch_bytes": 1}
    more = {"shared_slots": False, "static_bytes": 1, "duration_ms": 1.0, **numbers}
    replaced = CaptureReport(num_slots=(4,), **more)  # type: ignore[arg-type]
    assert "memsets" not in capture_line(replaced)
    assert "experts" not in capture_line(replaced)
    experts = "dispatch all-to-all, GEMM some, room for 1,536 rows"
    assert capture_line(replaced, experts).endswith(f"; experts: {experts}")
    kept = replace(replaced, memsets_kept="no bindings")
    assert capture_line(kept).endswith("; memset nodes were kept: no bindings")


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_environment_chooses_how_memsets_are_captured(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHUNKGRAPH_MEMSET_KERNELS", value)
    config = load_config(Path(__file__).parents[2] / "configs" / "cpu" / "gpt_pp2_cpu.yaml")
    assert capture_options(config).memset_kernels == (value == "1")
    assert GraphFlags().capture_options().memset_kernels == (value == "1")


def test_settings_that_are_not_saved_are_reported(tmp_path: Path) -> None:
    graphs = _graphs()
    assert save_run_record(graphs, GraphFlags(), _arguments(), None) is None
    line = start_line(graphs, GraphFlags(), None)
    assert "scope chunk, 4 + 2 slots on rank 0 (12 graphs), verify none" in line
    assert "settings not saved (neither --save nor --run-dir is set)" in line
    assert "\n" not in line
    assert f"settings in {tmp_path}" in start_line(graphs, GraphFlags(), tmp_path)
    graphs.num_banks = 2  # context-parallel sizes, or buckets
    assert "rank 0 (24 graphs)" in start_line(graphs, GraphFlags(), None)


def test_the_reason_for_a_partial_capture_is_reported_and_saved(tmp_path: Path) -> None:
    graphs = _graphs(scope=ChosenScope("block", "--cross-entropy-fusion-impl te"))
    line = start_line(graphs, GraphFlags(), None)
    assert "scope block (no whole chunk with --cross-entropy-fusion-impl te), 4 + 2" in line
    assert _saved(graphs, GraphFlags(), tmp_path)["capture"]["scope"] == "block"


def _saved(graphs: Any, flags: GraphFlags, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Return the saved record of a run with these flags."""
    path = save_run_record(graphs, flags, _arguments(**arguments), folder)
    assert path is not None
    record: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return record


def test_context_sizes_are_saved(tmp_path: Path) -> None:
    packing = PackingConfig(
        max_packed_seqs=512,
        context_parallel_sizes=(1, 2, 4),
    )
    flags = GraphFlags(packing=packing)
    sizes = {"world_size": 4, "max_tokens_per_rank": 1024, "max_packed_seqs": 512}
    limits = ContextLimits(**sizes, sizes=(1, 2, 4))
    groups: Any = SimpleNamespace(of=lambda size: None)
    banks = PackedBanks.of_limits(limits, groups, cuda_graph_cp_sizes=(1, 2))
    graphs = _graphs(context_banks=banks.keys, site=SimpleNamespace(packing=banks))
    record = _saved(graphs, flags, tmp_path)
    saved = record["packing"]
    assert saved["context_parallel_sizes"] == [1, 2, 4]
    assert (saved["seq_buckets"], saved["max_packed_tokens"]) == ([32, 64, 128, 256], 1024)
    assert record["graphs_of_rank_0"]["context_banks"] == [
        {"context_parallel_size": size, "tokens_per_rank": 1024, "max_packed_seqs": count}
        for size in (2, 1)
        for count in (512, 256, 128, 64, 32)
    ]


def test_defaults_are_saved_as_they_were_resolved(tmp_path: Path) -> None:
    """Not as typed: another release may have other defaults."""
    banks = PackedBanks.of_model(PackedShape(200, 2048), None)
    shapes = [bank.shape for bank in banks.keys]
    site = SimpleNamespace(packing=banks)
    graphs = _graphs(num_banks=2, packed_shapes=shapes, site=site)
    flags = GraphFlags(packing=PackingConfig(max_packed_seqs=200))
    record = _saved(graphs, flags, tmp_path, num_experts=8, moe_router_topk=2)
    assert record["packing"]["max_packed_tokens"] == 2048
    assert record["packing"]["seq_buckets"] == [64]
    assert record["graphs_of_rank_0"] == {
        "slots_per_chunk": [4, 2],
        "num_graphs": 24,
        "packed_shapes": [
            {"max_packed_seqs": 200, "max_packed_tokens": 2048},
            {"max_packed_seqs": 64, "max_packed_tokens": 2048},
        ],
    }
    assert record["model"]["moe_router_topk"] == 2
    unpacked = _saved(_graphs(), GraphFlags(), tmp_path)["packing"]
    assert (unpacked["max_packed_tokens"], unpacked["seq_buckets"]) == (None, None)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"chunkgraph\.yaml cannot be written"):
        save_run_record(_graphs(), GraphFlags(), _arguments(), tmp_path / "file")


@pytest.mark.parametrize("flag", ["profile", "use_pytorch_profiler", "nvtx_ranges"])
def test_replays_are_named_in_runs_that_are_profiled(flag: str) -> None:
    assert _is_profiled(argparse.Namespace(**{flag: True}))
    assert not _is_profiled(argparse.Namespace(**{flag: False}))


def test_reasons_are_zero_again_after_their_step() -> None:
    """Otherwise a curve would keep its last value."""
    counters = Counters()
    graphs: Any = SimpleNamespace(
        counters=counters, dropped_tokens=dict, engine=SimpleNamespace(report=None)
    )
    metrics = StepMetrics(graphs)
    counters.fallbacks["capture warmup"] += 1
    counters.overflow_reruns["stash pages"] += 2
    metrics.step()
    assert metrics.scalars()["chunk-graphs/steps-run-again/stash pages"] == 2
    assert metrics.scalars()["chunk-graphs/eager-steps/capture warmup"] == 1
    counters.replays += 4
    metrics.step()
    scalars = metrics.scalars()
    assert scalars["chunk-graphs/replays"] == 4
    assert scalars["chunk-graphs/eager-steps/capture warmup"] == 0
    assert "chunk-graphs/dropped-tokens" not in scalars
    line = metrics.take_line()
    rerun_text = "steps run again (stash pages): 2 |"
    assert line == f" graph replays:     4 | {rerun_text} eager steps (capture warmup): 1 |"
    assert metrics.take_line() == " graph replays:     0 |"

"""Experts through HybridEP on real GPUs equal eager, and a full rank loses no token."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONFIG = Path(__file__).resolve().parents[4] / "configs" / "gpu" / "moe_ep2_hybridep.yaml"
SMALL = [
    *("model.num_layers=4", "model.hidden_size=512", "model.ffn_hidden_size=1024"),
    *("moe.num_moe_experts=8", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=384"),
    "model.transformer_config.moe_shared_expert_intermediate_size=384",
    "model.transformer_config.moe_layer_freq=[0,1,1,1]",
    "model.transformer_config.moe_z_loss_coeff=0.001",
    *("model.seq_length=512", "moe.token_drops=rerun"),
]
WIDE = "moe.moe_expert_rank_capacity_factor=2.0"  # room for all on two ranks
EP2_PP1: list[str] = []
PP2 = [
    *("pipeline.pipeline_model_parallel_size=2", "pipeline.data_parallel_size=1"),
    *("pipeline.expert_model_parallel_size=1",),
]

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.multigpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("deep_ep") is None, reason="DeepEP's hybrid-ep is not installed"
    ),
]


def _train(settings: list[str], report: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "chunkgraph.cli", "train", str(CONFIG), *SMALL, *settings),
            *("--json", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def _trained(settings: list[str], tmp_path: Path) -> dict[str, Any]:
    report = tmp_path / "report.json"
    done = _train(settings, report)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    results: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert results["parameters_equal"]
    assert all(step["loss_equal"] and step["grad_norm_equal"] for step in results["steps"])
    return results


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        pytest.param([*EP2_PP1, WIDE], [4, 1, 2, 7], id="ep2"),
        pytest.param([*PP2, "moe.moe_expert_rank_capacity_factor=1.0"], [4, 1, 2, 7], id="pp2"),
        pytest.param([WIDE, "capture.verify=poison"], [2, 3, 1], id="poison"),
    ],
)
def test_replays_equal_eager(settings: list[str], counts: list[int], tmp_path: Path) -> None:
    results = _trained([*settings, f"train.num_microbatches={counts}"], tmp_path)
    assert all(step["replays"] for step in results["steps"][1:])
    assert not any(results["overflow_reruns"].values())


def test_hybrid_ep_computes_what_all_to_all_does(tmp_path: Path) -> None:
    """Up to rounding: both runs of a comparison with eager have the same dispatch."""
    apart = "train.compare=none", "train.num_microbatches=[4,2,3]"
    of_all = [
        "moe.moe_token_dispatcher_type=alltoall",
        *("moe.moe_expert_rank_capacity_factor=null", "moe.moe_expert_capacity_factor=4.0"),
    ]
    runs = []
    for name, settings in (("hybridep", [WIDE]), ("alltoall", of_all)):
        report = tmp_path / f"{name}.json"
        done = _train([*settings, *apart], report)
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        runs.append(json.loads(report.read_text(encoding="utf-8"))["steps"])
    for step, other in zip(*runs, strict=True):
        assert step["loss_chunk"] == pytest.approx(other["loss_chunk"], rel=1e-3)
        assert step["grad_norm_chunk"] == pytest.approx(other["grad_norm_chunk"], rel=2e-2)


def test_stashed_rows_equal_eager(tmp_path: Path) -> None:
    settings = [WIDE, "stash.enabled=true", "train.num_microbatches=[4,1,2,7]"]
    results = _trained(settings, tmp_path)
    assert all(step["replays"] for step in results["steps"][1:])
    pairs = zip(results["stash_bytes"], results["bytes_without_stash"], strict=True)
    # Half of the budget's rows hold a token.
    assert all(0 < pages < 0.75 * without for pages, without in pairs)


@pytest.mark.parametrize("stash", [False, True], ids=["no-stash", "stash"])
def test_a_step_over_the_budget_runs_again(stash: bool, tmp_path: Path) -> None:
    counts = [2, 3, 1, 4, 2, 7, 1, 3, 2, 4, 1, 2]
    settings = [
        *("moe.moe_expert_rank_capacity_factor=1.0", f"train.num_microbatches={counts}"),
        f"stash.enabled={str(stash).lower()}",
    ]
    results = _trained(settings, tmp_path)
    assert results["overflow_reruns"]["expert capacity"] >= 1
    assert sum(step["replays"] for step in results["steps"]) > 0

"""Experts through HybridEP on real GPUs equal eager; `test_gpu_dropless` has full ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_training import check_rounding, trained_report

from chunkgraph.megatron.features.experts.grouped_gemm import native_need

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


def _train(settings: list[str], report: Path) -> dict[str, Any]:
    return trained_report([CONFIG, *SMALL, *settings], report)


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        pytest.param([WIDE], [4, 1, 2, 7], id="ep2"),
        pytest.param([*PP2, "moe.moe_expert_rank_capacity_factor=1.0"], [4, 1, 2, 7], id="pp2"),
        pytest.param([WIDE, "stash.enabled=true"], [4, 1, 2, 7], id="stash"),
        pytest.param([WIDE, "capture.verify=poison"], [2, 3, 1], id="poison"),
        pytest.param([WIDE, "capture.verify=shadow"], [2, 3, 1], id="shadow"),
    ],
)
def test_replays_equal_eager_up_to_rounding(
    settings: list[str], counts: list[int], tmp_path: Path
) -> None:
    """Megatron's eager experts have other kernels; ``shadow`` ends the run if a bit differs."""
    if (need := native_need(torch.bfloat16)) is not None:
        pytest.skip(f"Megatron's own pass with a budget: {need}")
    results = _train([*settings, f"train.num_microbatches={counts}"], tmp_path / "report.json")
    check_rounding(results)
    assert not any(results["overflow_reruns"].values())
    if "stash.enabled=true" in settings:  # half of the budget's rows hold a token
        pairs = zip(results["stash_bytes"], results["bytes_without_stash"], strict=True)
        assert all(0 < pages < 0.75 * without for pages, without in pairs)

"""Mixture of experts with a fixed capacity: chunk graphs against eager training, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(200)]

_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_expert_capacity_factor": 1.0,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
_BIASED = {
    **_EXPERTS,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_shared_expert_intermediate_size": 32,
}
_GATED = {"swiglu": True, "normalization": "RMSNorm", "hidden_dropout": 0.1}


def _check(results: dict[str, dict[str, Any]], metrics: dict[str, set[str]]) -> None:
    for name, result in results.items():
        equal = ("loss_equal", "grad_norm_equal", "expert_metrics_equal")
        wrong = [step for step in result["steps"] if not all(step[key] for key in equal)]
        assert not wrong, f"{name}: {wrong}"
        assert result["different_parameters"] == {}, name
        assert result["capture_sessions"] == 1, name
        assert len({s["loss_chunk_hex"] for s in result["steps"]}) == len(result["steps"]), name
        for step in result["steps"]:
            recorded = {key for key, value in step["expert_metrics"].items() if value > 0}
            assert recorded == metrics[name], name
        assert all(step["replays"] > 0 for step in result["steps"][1:]), name


def test_one_rank(run_cases: Callable[..., Any], make_config: Callable[..., Any]) -> None:
    cases = {
        "softmax": {"config": make_config(model=_GATED, moe=_EXPERTS, train={"num_microbatches": [2, 3, 1, 4]})},
    }
    results = run_cases(cases, 1)
    _check(results, {"softmax": {"load_balancing_loss", "z_loss"}})
